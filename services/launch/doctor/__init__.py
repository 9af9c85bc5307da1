"""What stands in the way of running well here, each finding with its remedy; asked by `outrigger doctor`.

facts.py      what was found out, as plain values without a name, a user or a path in them
findings.py   what these facts mean, and what to do about it (pure)
machine.py    looks at this machine: memory, the GPU's limit, disk, ports, interfaces
worker.py     asks the worker: its control channel, and its link when nobody uses it
"""
