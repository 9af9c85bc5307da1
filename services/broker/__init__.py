"""The broker: which old pages of keys and values live where, and the journal that keeps a copy of each on disk.

    ledger.py     where the copies of every page are; lets no copy go that is the last one. Pure
    release.py    how many groups the host should let go, and which groups which worker holds. Pure
    journal.py    the files on disk: append, find by content, drop by last use (records.py: how they look)
    pushing.py    what one worker is given, and what it said of it. Pure
    broker.py     the process: routes HOLD (mac) and PAGES (bridge) around the parts above

It knows bytes, hashes and token ids, and not how attention is computed. Started by services.launch.
"""
