"""Processes on the host: policy, sockets, HTTP. No tensor arithmetic beyond calling the engine."""
