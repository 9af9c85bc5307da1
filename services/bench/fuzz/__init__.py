"""Hostile bytes for the cable: what nobody should send, against the codec and against a running worker.

frames.py   makes frames and greetings, right, wrong and nearly right, from a seed
codec.py    feeds both ends' link state machines with them, in this process
live.py     feeds a worker process with them and counts what it says
guided.py   lets a coverage-guided fuzzer (the extra `fuzz`) look for more, in a process of its own
"""
