"""Plain TCP as a yardstick for the cable: `python -m services.bench.raw_tcp` answers every message with 16 bytes.

A message is u64 n_bytes, then that many. The socket has the cable's options and is read into memory used before, in
pieces as long as the cable's, waiting for whole ones as the worker does: what remains between the two is what our
protocol costs. Started by services.bench.link on the port of settings.worker.port; ends when its client does.
"""

from __future__ import annotations

import os
import socket
import struct

from common.config import find_file, load_settings
from common.wire.cable_options import cable_options
from common.wire.stream import PIECE_BYTES

HEAD = struct.Struct("<Q")
ANSWER = bytes(16)


class RawClient:
    """Sends messages and takes their answers, blocking."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = tuned(socket.create_connection(address))
        self._answer = memoryview(bytearray(len(ANSWER)))

    def send(self, data: memoryview) -> None:
        """One message; returns when the system has all of it."""
        sent = self.sock.sendmsg([HEAD.pack(len(data)), data])
        if sent < HEAD.size + len(data):
            self.sock.sendall(data[sent - HEAD.size :])

    def take(self) -> None:
        """Wait for one answer."""
        fill(self.sock, self._answer)

    def close(self) -> None:
        self.sock.close()


def tuned(sock: socket.socket) -> socket.socket:
    """`sock` with the options of the cable's sockets."""
    for level, option, value in cable_options(socket):
        sock.setsockopt(level, option, value)
    return sock


def fill(sock: socket.socket, view: memoryview) -> bool:
    """Receive all of `view`; False when the other side closed before."""
    done = 0
    while done < len(view):
        n = sock.recv_into(view[done : done + PIECE_BYTES], 0, socket.MSG_WAITALL)
        if not n:
            return False
        done += n
    return True


def serve(port: int) -> None:
    """Answer one client until it closes."""
    with socket.create_server(("127.0.0.1", port)) as door:
        sock, _ = door.accept()
    tuned(sock)
    memory = memoryview(bytearray(64))
    head = memoryview(bytearray(HEAD.size))
    while fill(sock, head):
        (n_bytes,) = HEAD.unpack(head)
        if n_bytes > len(memory):
            memory = memoryview(bytearray(n_bytes))
        if not fill(sock, memory[:n_bytes]):
            break
        sock.sendall(ANSWER)
    sock.close()


if __name__ == "__main__":
    serve(load_settings(find_file(os.environ), os.environ).worker.port)
