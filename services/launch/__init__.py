"""Starts the processes of one host, watches them, and ends with nothing left running: what `outrigger run` does.

    programs.py    which processes a set of settings needs, and how each is started
    ports.py       free ports; whose a taken one is
    tail.py        the tail file that the worker on this machine is given
    supervisor.py  the supervision library: its configuration, its process, what it says of ours
    roster.py      who is ready, and where they listen
    lock.py        one launch for a run directory
    logs.py        the line that says why a process ended
    launch.py      the order of it all
    words.py       what a person is told

Knows no HTTP, no tensors and no cable.
"""
