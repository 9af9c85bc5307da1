"""Hostile frames against a running worker, over its own sockets; counts what it says and how it ends.

What must hold: it answers every well-formed request once, says at most one error of the connection as a whole and then
closes, never hangs, and afterwards serves an honest host as before. Used by services.bench.verify_fuzz and tests.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from common.model.spec import ModelSpec
from common.wire import attention_base_frames as page_base
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.fingerprint import fingerprint
from common.wire.frames import RESIDUAL, Frame, decode, encode, split_stamp
from common.wire.grammar import RESIDUAL_RULES, Rules
from common.wire.layout import Payload
from common.wire.stream import FrameReader
from services.bench.fuzz.frames import FrameMaker, Hostile

SILENCE_S_MAX = 20.0
FRAMES_A_CONNECTION = 400
BAD_GREETINGS = 0.2
PONG_BYTES = 3
"""So many are asked of a PING that follows a hostile frame."""


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

    def __init__(self, address: tuple[str, int], rules: Rules = RESIDUAL_RULES) -> None:
        self.errors = 0
        self._rules = rules
        self.outcomes: Counter[str] = Counter()
        self._sock = socket.create_connection(address)
        self._sock.settimeout(SILENCE_S_MAX)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = FrameReader(rules.channel.magic, rules.channel.bytes_max)
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
                self._arrived.append(decode(self._rules.channel, raw.type, body))
        frame = self._arrived.pop(0)
        whole = ends_connection(frame, self._rules)
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
            if isinstance(frame, base.Pong | page_base.Ok) and len(frame.data.joined()) == PONG_BYTES:
                ponged = True
                answered &= isinstance(
                    frame, base.Pong
                )  # on the other channel a PING is answered in its turn
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


def ends_connection(frame: Frame, rules: Rules) -> bool:
    """Whether the worker speaks of the connection as a whole."""
    return isinstance(frame, rules.err) or (isinstance(frame, rules.err2) and frame.answers == 0)


class Subject(Protocol):
    """A channel of a worker under fire: how an honest host begins, what a hostile one says, what must go on working."""

    rules: Rules
    ping: bytes

    def maker(self, rng: random.Random) -> FrameMaker:
        """Of hostile frames."""
        ...

    def opening(self) -> tuple[int, list[bytes]]:
        """(epoch, the frames that an honest host says first); each is answered by no error."""
        ...

    def check(self, host: HostileHost, epoch: int) -> str:
        """Ask what an honest host would, after the opening; what was wrong with the answers, or nothing."""
        ...


class ResidualSubject:
    """The tail's channel."""

    rules = RESIDUAL_RULES
    ping = b"".join(encode(RESIDUAL, base.Ping(PONG_BYTES)))

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def maker(self, rng: random.Random) -> FrameMaker:
        """See Subject."""
        return FrameMaker(rng, self._spec.n_embd)

    def opening(self) -> tuple[int, list[bytes]]:
        """See Subject."""
        epoch = time.time_ns()
        return epoch, [greeting(self._spec, epoch)]

    def check(self, host: HostileHost, epoch: int) -> str:
        """See Subject."""
        chunk = ext.Chunk2(0, 4, base.DTYPE_F32, 0, Payload(bytes(16 * self._spec.n_embd)))
        host.say(b"".join(encode(RESIDUAL, chunk, epoch=epoch, seq=2)))
        answer = host.hear()
        right = isinstance(answer, ext.Chunk2Ack) and answer.n_valid == 4
        return "" if right else f"an honest host was answered {answer}"


def fuzz_link(address: tuple[str, int], spec: ModelSpec, seed: int, n_frames: int) -> LiveCounts:
    """`fuzz` of the tail's channel."""
    return fuzz(address, ResidualSubject(spec), seed, n_frames)


def fuzz(address: tuple[str, int], subject: Subject, seed: int, n_frames: int) -> LiveCounts:
    """Connections of hostile hosts until n_frames were sent; honest ones in between must be served."""
    rng, counts = random.Random(seed), LiveCounts()
    maker = subject.maker(rng)
    while counts.frames < n_frames:
        host = HostileHost(address, subject.rules)
        counts.connections += 1
        try:
            _converse(host, maker, rng, subject, counts)
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
            _check_honest(address, subject, counts)
        if len(counts.problems) > 5:
            break
    _check_honest(address, subject, counts)
    return counts


def _converse(
    host: HostileHost, maker: FrameMaker, rng: random.Random, subject: Subject, counts: LiveCounts
) -> None:
    """One connection from its first byte to its end."""
    epoch, opening = subject.opening()
    if rng.random() < BAD_GREETINGS:
        bad = maker.bad_greeting(opening[0])
        counts.frames += 1
        host.say(bad.data)
        if bad.outcome != "never ends":
            host.hear()
        return
    counts.frames += len(opening)
    if not _opened(host, opening, subject):
        return  # the one before still has the place for a moment
    seq = len(opening) + 1
    for _ in range(FRAMES_A_CONNECTION):
        hostile = maker.frame(epoch, seq)
        counts.frames += 1
        counts.outcomes[f"sent {hostile.kind}"] += 1
        if not _say_and_hear(host, hostile, subject, counts):
            return
        seq += hostile.numbered


def _opened(host: HostileHost, opening: list[bytes], subject: Subject) -> bool:
    """Whether each of these was answered by no error."""
    for data in opening:
        answer = host.hear() if host.say(data) else None
        if answer is None or isinstance(answer, (subject.rules.err, subject.rules.err2)):
            return False
    return True


def _say_and_hear(host: HostileHost, hostile: Hostile, subject: Subject, counts: LiveCounts) -> bool:
    """Send one frame and hear what comes of it; False when the connection is over."""
    if not host.say(hostile.data):
        return False
    if hostile.outcome == "never ends":
        return False
    if hostile.outcome == "answer":
        answer = host.hear()
        while isinstance(answer, base.Ping):
            answer = host.hear()
        if answer is None or ends_connection(answer, subject.rules):
            counts.problems.append(f"a well-formed {hostile.kind} ended the connection: {answer}")
            return False
        return True
    # One of the many ways to be wrong: refused, dropped, or the end. A PING after it tells which.
    return host.say(subject.ping) and host.hear_until_pong(answered=hostile.numbered)


def _check_honest(address: tuple[str, int], subject: Subject, counts: LiveCounts) -> None:
    """A host that does everything right is greeted and served, at once or as soon as the one before is gone."""
    for _ in range(50):
        host = HostileHost(address, subject.rules)
        try:
            epoch, opening = subject.opening()
            if not _opened(host, opening, subject):
                time.sleep(0.05)
                continue
            if problem := subject.check(host, epoch):
                counts.problems.append(problem)
            counts.outcomes["honest hosts"] += 1
            return
        except TimeoutError:
            break
        finally:
            host.close()
    counts.problems.append("an honest host was not served")


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
