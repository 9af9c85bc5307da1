"""What every process on the host stands on: the bus, the process skeleton, the run directory, the metrics endpoint.

Knows no model and no HTTP API. Used by gateway, mac, bridge and launch.
"""
