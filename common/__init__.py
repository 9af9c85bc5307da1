"""Words and mathematics spoken or computed by two or more processes.

Opens no socket, starts no thread, imports neither zmq nor coremltools. What only one process needs lives with that
process. tests/test_architecture.py holds these sentences.
"""
