"""What is said between processes and over the cable: messages and routes of the bus, frames and grammar of the link.

Bytes in, events out: no socket, no thread, no clock of its own. Knows nothing of tensors beyond their byte counts.
"""
