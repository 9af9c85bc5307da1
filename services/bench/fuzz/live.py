"""Hostile frames and lines against a running worker, over its own sockets; counts what it says and how it ends.

What must hold: it answers every well-formed request once, says at most one error of the connection as a whole and then
closes, never hangs, and afterwards serves an honest host as before. Used by services.bench.verify_fuzz and tests.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from common.limits import CONTROL_LINE_BYTES_MAX
from common.model.spec import ModelSpec
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.fingerprint import fingerprint
from common.wire.frames import RESIDUAL, Frame, decode, encode, split_stamp
from common.wire.layout import Payload
from common.wire.stream import FrameReader
from services.bench.fuzz.frames import FrameMaker, Hostile

SILENCE_S_MAX = 20.0
FRAMES_A_CONNECTION = 400
BAD_GREETINGS = 0.2
COMMANDS = (
    "mem",
    "ls",
    "watch",
    "mac",
    "mac ready",
    "mac reading 1 2 3",
    "mac x",
    "fetch a b",
    "life",
    "fault",
    "",
)
PING = b"".join(encode(RESIDUAL, base.Ping(3)))


@dataclass
class LiveCounts:
    """What a worker made of it. `problems`: sentences about what must not be."""

    frames: int = 0
    connections: int = 0
    control_lines: int = 0
    errors_a_connection_max: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class HostileHost:
    """One connection. `errors` counts what the worker said of the connection as a whole."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.errors = 0
        self.outcomes: Counter[str] = Counter()
        self._sock = socket.create_connection(address)
        self._sock.settimeout(SILENCE_S_MAX)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader(RESIDUAL.magic, RESIDUAL.bytes_max)
        self._arrived: list[Frame] = []

    def say(self, data: bytes) -> bool:
        """False: the worker has closed."""
        try:
            self._sock.sendall(data)
        except OSError:
            return False
        return True

    def hear(self) -> Frame | None:
        """The next frame; None: the worker closed. Raises TimeoutError when it is silent."""
        while not self._arrived:
            try:
                n = self._sock.recv_into(self._reader.buffer())
            except ConnectionError:
                return None
            if not n:
                return None
            for raw in self._reader.advance(n):
                _, body = split_stamp(raw.type, raw.payload)
                self._arrived.append(decode(RESIDUAL, raw.type, body))
        frame = self._arrived.pop(0)
        whole = isinstance(frame, base.Err) or (isinstance(frame, ext.Err2) and frame.answers == 0)
        self.errors += whole
        self.outcomes["error" if whole else frame.NAME.lower()] += 1
        return frame

    def hear_until_pong(self, *, answered: bool) -> bool:
        """Read until the answer to a PING sent last; False: the worker closed before.

        answered: something before it is owed an answer, too, which may come after the PONG: that has no queue.
        """
        ponged = False
        while not ponged or answered:
            if (frame := self.hear()) is None:
                return False
            if isinstance(frame, base.Pong):
                ponged |= len(frame.data.joined()) == 3
            elif not isinstance(frame, base.Ping):
                answered = False
        return True

    def close(self) -> None:
        self._sock.close()


def greeting(spec: ModelSpec, epoch: int) -> bytes:
    """An honest HELLO3 for all layers of the worker's file."""
    text = spec.fingerprint_text(max(spec.layer_start, 1))
    hello = ext.Hello3(
        ext_min=1, ext_max=1, boot_id=1, features=3, lse_base=1, kv_type=1, page_tokens=4096, group_pages=4,
        frame_mib_max=256, window=4, split_layer=max(spec.layer_start, 1), n_layer_full=spec.n_layer_full,
        n_embd=spec.n_embd, n_vocab=spec.n_vocab, n_ctx=512, device="fuzz", fingerprint=fingerprint(text), text=text,
    )  # fmt: skip
    return b"".join(encode(RESIDUAL, hello, epoch=epoch, seq=1))


def fuzz_link(address: tuple[str, int], spec: ModelSpec, seed: int, n_frames: int) -> LiveCounts:
    """Connections of hostile hosts until n_frames were sent; honest ones in between must be served."""
    rng, counts = random.Random(seed), LiveCounts()
    maker = FrameMaker(rng, spec.n_embd)
    while counts.frames < n_frames:
        host = HostileHost(address)
        counts.connections += 1
        try:
            _converse(host, maker, rng, spec, counts)
        except TimeoutError:
            counts.problems.append(
                f"the worker was silent for {SILENCE_S_MAX:g} s (connection {counts.connections})"
            )
        finally:
            host.close()
        counts.outcomes += host.outcomes
        counts.errors_a_connection_max = max(counts.errors_a_connection_max, host.errors)
        if host.errors > 1:
            counts.problems.append(f"{host.errors} errors on connection {counts.connections}")
        if counts.connections % 50 == 0:
            _check_honest(address, spec, counts)
        if len(counts.problems) > 5:
            break
    _check_honest(address, spec, counts)
    return counts


def _converse(
    host: HostileHost, maker: FrameMaker, rng: random.Random, spec: ModelSpec, counts: LiveCounts
) -> None:
    """One connection from its first byte to its end."""
    epoch = time.time_ns()
    hello = greeting(spec, epoch)
    if rng.random() < BAD_GREETINGS:
        bad = maker.bad_greeting(hello)
        counts.frames += 1
        host.say(bad.data)
        if bad.outcome != "never ends":
            host.hear()
        return
    host.say(hello)
    counts.frames += 1
    if not isinstance(host.hear(), ext.Hello3Ok):
        return  # the one before still has the place for a moment
    seq = 2
    for _ in range(FRAMES_A_CONNECTION):
        hostile = maker.frame(epoch, seq)
        counts.frames += 1
        counts.outcomes[f"sent {hostile.kind}"] += 1
        if not _say_and_hear(host, hostile, counts):
            return
        seq += hostile.numbered


def _say_and_hear(host: HostileHost, hostile: Hostile, counts: LiveCounts) -> bool:
    """Send one frame and hear what comes of it; False when the connection is over."""
    if not host.say(hostile.data):
        return False
    if hostile.outcome == "never ends":
        return False
    if hostile.outcome == "answer":
        answer = host.hear()
        while isinstance(answer, base.Ping):
            answer = host.hear()
        if answer is None or (isinstance(answer, ext.Err2) and answer.answers == 0):
            counts.problems.append(f"a well-formed {hostile.kind} ended the connection: {answer}")
            return False
        return True
    # One of the many ways to be wrong: refused, dropped, or the end. A PING after it tells which.
    return host.say(PING) and host.hear_until_pong(answered=hostile.numbered)


def _check_honest(address: tuple[str, int], spec: ModelSpec, counts: LiveCounts) -> None:
    """A host that does everything right is greeted and served, at once or as soon as the one before is gone."""
    for _ in range(50):
        host, epoch = HostileHost(address), time.time_ns()
        try:
            host.say(greeting(spec, epoch))
            if not isinstance(host.hear(), ext.Hello3Ok):
                time.sleep(0.05)
                continue
            chunk = ext.Chunk2(0, 4, base.DTYPE_F32, 0, Payload(bytes(16 * spec.n_embd)))
            host.say(b"".join(encode(RESIDUAL, chunk, epoch=epoch, seq=2)))
            answer = host.hear()
            if not isinstance(answer, ext.Chunk2Ack) or answer.n_valid != 4:
                counts.problems.append(f"an honest host was answered {answer}")
            counts.outcomes["honest hosts"] += 1
            return
        except TimeoutError:
            break
        finally:
            host.close()
    counts.problems.append("an honest host was not served")


def fuzz_control(address: tuple[str, int], seed: int, n_lines: int, counts: LiveCounts) -> None:
    """Lines to the control channel: commands, nearly commands, bytes, endless ones. Each has one line of JSON back."""
    rng = random.Random(seed)
    sent = 0
    while sent < n_lines:
        with socket.create_connection(address) as sock:
            sock.settimeout(SILENCE_S_MAX)
            lines = sock.makefile("rb")
            while sent < n_lines:
                line = _line(rng)
                sent += 1
                try:
                    sock.sendall(line + b"\n")
                    answer = lines.readline()
                except TimeoutError:
                    counts.problems.append(f"the control channel was silent after {line[:60]!r}")
                    return
                except OSError:
                    answer = b""
                if not answer:
                    if len(line) < CONTROL_LINE_BYTES_MAX:
                        counts.problems.append(f"the control channel closed after {line[:60]!r}")
                    break
                if not isinstance(json.loads(answer), dict):
                    counts.problems.append(f"the control channel answered {answer[:60]!r}")
                if line.strip() == b"watch":
                    break
    counts.control_lines += sent


def _line(rng: random.Random) -> bytes:
    if rng.random() < 0.6:
        words = [
            rng.choice(COMMANDS),
            *(rng.choice(("1", "-1", "9" * 30, "é", "\0")) for _ in range(rng.randrange(3))),
        ]
        return " ".join(words).encode()
    n = rng.choice((1, 10, 1000, 1000, CONTROL_LINE_BYTES_MAX + 10))
    return rng.randbytes(n).replace(b"\n", b" ")


@dataclass(frozen=True)
class Footprint:
    """What a process holds: resident bytes, threads, descriptors."""

    rss_bytes: int
    n_threads: int
    n_fds: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        process = psutil.Process(pid)
        return cls(process.memory_info().rss, process.num_threads(), process.num_fds())
