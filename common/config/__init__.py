"""Settings: one frozen tree, read once at the start of a process from a file, the environment and flags.

    tree.py    every setting there is, with its default, range and one sentence
    keys.py    the same as a table: names and ranges in words
    load.py    where values come from, and what is said about a bad one

A process calls `load_settings` in its __main__ and hands each part its own leaf, never the tree.
"""

from common.config.load import Explained, explain_settings, find_file, load_settings, to_environ
from common.config.tree import (
    EMBEDDED_MODEL,
    BridgeSettings,
    GatewaySettings,
    HostSettings,
    LogSettings,
    MetricsSettings,
    RunSettings,
    Settings,
    WorkerSettings,
    ZmqSettings,
)

__all__ = [
    "EMBEDDED_MODEL",
    "BridgeSettings",
    "Explained",
    "GatewaySettings",
    "HostSettings",
    "LogSettings",
    "MetricsSettings",
    "RunSettings",
    "Settings",
    "WorkerSettings",
    "ZmqSettings",
    "explain_settings",
    "find_file",
    "load_settings",
    "to_environ",
]
