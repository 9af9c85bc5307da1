"""Faults on purpose, and what the same answers are worth under them.

    cases.py       every fault at every moment, as a table of scripts; what must be seen of each
    far_end.py     the emulated worker's control channel: arm faults, ask which happened
    prompts.py      cold prompts, and their right answers
    trial.py       one fault during one answer, and the answer after it
    footprint.py   descriptors, threads and memory of processes, before and after
    system.py      the whole system as `outrigger run` starts it, with pids and a client
    kills.py       kill -9 of each process, again and again

Put together by services.bench.verify_faults.
"""
