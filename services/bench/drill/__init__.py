"""Faults on purpose, one after the other, on a system of the user's own settings; called by services.cli.drill.

    cases.py     what goes wrong, when, and what must come of it: a table, and the judgement (pure)
    system.py    a system to strike: started, asked, its worker's faults armed, its gauges read
    prompts.py   what is asked, with the right answers
    trial.py     one case: strike in the middle of an answer, wait until all is whole, look for leaks
    past.py      the same past the host's limit, where old pages are with the worker and in the journal
    journal.py   a journal seen from outside: files, bytes, lock
    run.py       all cases, and the table at the end

Unlike services.bench.faults, which goes through every fault at every moment on models of its own, this is for the
person who set the system up, and takes minutes.
"""
