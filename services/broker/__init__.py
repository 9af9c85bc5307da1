"""The broker: which old pages of keys and values live where, and the journal that keeps a copy of each on disk.

    ledger.py     where the copies of every page are; lets no copy go that is the last one. Pure
    release.py    how many groups the host should let go. Pure
    sharing.py    which groups which worker holds, by speed and memory (workers.py: as workers come and go). Pure
    pushing.py    what one worker is given, and what it said of it. Pure
    keeping.py    token ids become names of contents (chain.py)
    journal.py    the files on disk: append, find by content, drop by last use (records.py: how they look;
                  journal_files.py: one of them; journal_lock.py: whose they are)
    looking.py    which page is hashed next, in search of damage. Pure
    tally.py      the metrics
    broker.py     the process: routes HOLD (mac) and PAGES (bridges) around the parts above

It knows bytes, hashes and token ids, and not how attention is computed. Started by services.launch.
"""
