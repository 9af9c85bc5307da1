"""Starts the processes of one host, watches them, and ends with nothing left running: `outrigger run`, `up`, `down`.

    launch.py      from settings to a run: checks, lock, tail file, signals
    running.py     one run: started, counted in, asked how it is, stopped in order
    watch.py       one look a second at what runs; carries out what vigil.py decides
    vigil.py       the rules: who is well, silent or stuck; when one is ended, when tried again
    roster.py      what each process says of itself, and what the supervisor sees
    supervisor.py  the supervision library: its configuration, its process, what it says of ours
    supervisord.py that process; ends.py: how each of ours ended, as written down there
    endings.py     why one ended, in one sentence: signal, place, what was running
    worker_line.py how the worker on this machine is; it is on no bus
    programs.py    which processes a set of settings needs, and how each is started
    ports.py       free ports; whose a taken one is
    tail.py        the tail file that the worker on this machine is given
    lock.py        one launch for a run directory
    background.py  a launch that outlives the terminal: up and down
    inquiry.py     asks a launch how it is: status
    logs.py        where logs are, the line that says why; log_reader.py: all of them as one
    words.py       what a person is told

Knows no HTTP, no tensors and no cable.
"""
