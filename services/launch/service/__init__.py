"""Outrigger as a service of the machine: files for launchd (a Mac) and systemd (Linux), for one user, without root.

    launchd.py   a property list, by plistlib
    systemd.py   a unit of the user's own systemd
    plan.py      which files go where, and what is to be run afterwards

Called by services.cli.service. What is started is `outrigger run`, which drains by itself when it is told to stop.
"""
