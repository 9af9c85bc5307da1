"""What a sequence leaves behind in the layers: K/V rows and recurrent state, and how they are taken out and put back.

Knows shapes and types, not how rows are computed. Used by common/engine, on the host and on the worker.
"""
