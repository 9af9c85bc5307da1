"""The worker's door: listens for hosts on one binary channel and decides whom it serves.

One client at a time. A second one is refused while the first answers; otherwise the newest wins. Addresses that are
neither loopback nor link-local are closed at once and counted. Knows no tensors and no frames; each connection is a
device.session on a thread of its own, and all work goes to the compute thread, or to the desk for pages.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from common.errors import ServiceError, WorkerBusyError
from common.limits import WORKER_CLIENTS_MAX
from common.log import get_log
from common.wire.cable_options import cable_options
from common.wire.cable_peers import may_connect
from common.wire.grammar import Role
from common.wire.link import Link
from device.compute import Client, Work
from device.session import Session, SessionSocket

log = get_log()

PING_WAIT_S = 1.0


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ServiceError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=16)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # strerror repeats the address
        raise ServiceError(
            f"cannot listen on {host}:{port}: {why}; choose another address (--host: one that this machine has, "
            f"`ip addr` or `ifconfig` shows them) or port (--port, --control-port; 0 takes a free one)"
        ) from error


def tune(sock: socket.socket) -> None:
    """No delay, wide buffers where the system grants them, and a quick end when the cable is pulled."""
    for level, option, value in cable_options(socket):
        sock.setsockopt(level, option, value)


class Desk(Protocol):
    """Where requests go: the compute thread, which queues them, or the desk for pages, which answers at once."""

    def submit(self, work: Work) -> None: ...

    def release(self, client: Client) -> None: ...


class LinkServer:
    """Accepts clients until `stop`. `counts`: accepted, refused_address, refused_busy, refused_full, replaced."""

    def __init__(
        self,
        listener: socket.socket,
        desk: Desk,
        *,
        window: int,
        make_link: type[Link] = Link,
        on_change: Callable[[], None] = lambda: None,
        wrap: Callable[[socket.socket], SessionSocket] = lambda sock: sock,
    ) -> None:
        """make_link: the channel's link. wrap: what each admitted connection's socket is exchanged for (the emulator
        has its own)."""
        self.counts: Counter[str] = Counter()
        self._listener = listener
        self._wrap = wrap
        self._desk, self._make_link = desk, make_link
        self._window = window
        self._on_change = on_change
        self._claims = threading.Lock()
        self._guard = threading.Lock()
        self._sessions: set[Session] = set()
        self._holder: Session | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def serving(self) -> str | None:
        """The client served now, or None."""
        holder = self._holder
        return holder.peer if holder else None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Take no more clients and end those there are."""
        self._stopping = True
        with suppress(OSError):  # wakes accept() on Linux; elsewhere close does
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._guard:
            sessions = list(self._sessions)
        for session in sessions:
            session.close("the worker stops")

    # --- one client after the other

    def _accept(self) -> None:
        while not self._stopping:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if not self._stopping:
                    log.error("accept failed", error=str(error))
                    time.sleep(0.1)  # out of descriptors, most likely: do not spin
                continue
            self._admit(sock, address[0], f"{address[0]}:{address[1]}")

    def _admit(self, sock: socket.socket, host: str, peer: str) -> None:
        if not may_connect(host):
            self._turn_away(
                sock, peer, "refused_address", "only loopback and link-local addresses may connect"
            )
            return
        with self._guard:
            full = len(self._sessions) >= WORKER_CLIENTS_MAX
        if full:
            self._turn_away(sock, peer, "refused_full", f"{WORKER_CLIENTS_MAX} connections are open")
            return
        tune(sock)
        link = self._make_link(Role.WORKER, window=self._window)
        session = Session(
            self._wrap(sock), peer, link=link, on_greeting=self._claim, on_work=self._desk.submit
        )
        with self._guard:
            self._sessions.add(session)
        self.counts["accepted"] += 1
        threading.Thread(target=self._serve, args=(session,), name=f"client {peer}", daemon=True).start()

    def _turn_away(self, sock: socket.socket, peer: str, count: str, why: str) -> None:
        self.counts[count] += 1
        sock.close()
        log.warning("client turned away", peer=peer, reason=why)

    def _serve(self, session: Session) -> None:
        session.serve()
        with self._guard:
            self._sessions.discard(session)
            held = self._holder is session
            if held:
                self._holder = None
        self._desk.release(session)
        if held:
            self._on_change()
        session.dispose()

    def _claim(self, session: Session) -> None:
        """Give the place to `session`, which has just greeted. Raises WorkerBusyError while the holder answers."""
        with self._claims:
            holder = self._holder
            if holder is session:
                return
            if holder is not None and holder.answers(PING_WAIT_S):
                self.counts["refused_busy"] += 1
                raise WorkerBusyError(
                    f"this worker serves {holder.peer}, which is alive; stop that host first"
                )
            with self._guard:
                self._holder = session
            if holder is not None:
                self.counts["replaced"] += 1
                holder.close("a newer client came and this one did not answer")
        self._on_change()
