"""The worker with a link one can set: bandwidth, delay, jitter, compute slow-down, and faults by script.

    profiles.py   what a cable is like: names, numbers, how they are written
    faults.py     the language of fault scripts
    gate.py       which faults are armed, and when each of them fires
    tracker.py    which frame a byte belongs to
    pace.py       when a byte would have arrived
    link.py       the worker's socket with all of this in it
    stand_in.py   the parts put together for device.worker
    achieved.py   measures what the set link really does on this machine

The worker itself is the real one: same engine, same answers, same files. Everything happens in its own threads, by
sleeping; there is no process in between that would eat a core. docs/emulator.md tells how to use it.
"""
