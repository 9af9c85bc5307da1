"""RemoteSpan: the tail layers on the worker, with the manners of a LayerSpan cut in two: start, then wait.

A chunk is started with its residual and answered later with the rows the worker wrote. Answers come in the order of
the questions. Everything an answer carries is checked before anybody uses it: a wrong ticket, count, range or epoch,
an answer that is late, a row that is not finite raise LinkError, after which the whole span is thrown away. Knows
nothing of sockets (the channel is given), nor of what the host does meanwhile. Called by services.mac.read on the
compute thread.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import (
    LinkDeadlineError,
    LinkDownError,
    LinkError,
    ProtocolError,
    StaleEpochError,
)
from common.wire import messages as m
from common.wire.rows import RowSection, decode_rows, encode_rows
from services.mac.mirror import Mirror
from services.mac.rows_check import TailRows

FIRST_ANSWER_S = 60.0
"""Deadline while nothing is known of the worker's speed."""
ANSWER_S_MIN = 5.0
ANSWER_SLOWDOWN_MAX = 10.0
"""A chunk that takes this many times as long as the one before is given up."""


class ResidualChannel(Protocol):
    """The asker's end of route "residual"; services.runtime.bus.BlockingAsker is one."""

    def send(self, message: m.Message, *arrays: Any) -> None:
        """Raises LinkDownError when the message cannot leave. Arrays must not change afterwards."""

    def recv(self, timeout_s: float | None) -> Any | None:
        """The next message (with .message and .frames), or None after timeout_s."""

    def losses(self) -> int:
        """How often the connection to the far end went down so far."""


@dataclass(frozen=True)
class TailRan:
    """The worker ran its layers over tokens [position, position + n_tokens): these are the rows it wrote."""

    position: int
    n_tokens: int
    sections: Sequence[RowSection]
    has_state: bool
    worker_s: float
    queue_s: float
    round_trip_s: float
    logits: NDArray[np.float32] | None = None
    """f32 [n_vocab] of its last row, if they were wanted."""

    @property
    def end(self) -> int:
        return self.position + self.n_tokens


@dataclass(frozen=True)
class MirrorMoved:
    """The worker's mirror now holds [0, n) (answer to a rewind or a push)."""

    n: int


@dataclass(frozen=True)
class StatePulled:
    """The tail's recurrent state after `end` positions (answer to a pull)."""

    end: int
    sections: Sequence[RowSection]


@dataclass(frozen=True)
class _Asked:
    """A question in flight; `n_expected` is where a push must leave the mirror, None when any place will do."""

    message: m.Message
    at_s: float
    n_expected: int | None = None


class RemoteSpan:
    """Layers [rows.first, rows.last) on the worker, for one life of the link.

    tickets: a counter shared by all spans of a channel, so that answers to an abandoned span are recognised as late.
    """

    def __init__(
        self,
        channel: ResidualChannel,
        rows: TailRows,
        *,
        link_epoch: int,
        window: int,
        tickets: itertools.count[int],
        n_vocab: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows, self.link_epoch, self.window = rows, link_epoch, window
        self.mirror = Mirror()
        self.late_answers = 0
        self._n_vocab = n_vocab
        self._channel, self._tickets, self._clock = channel, tickets, clock
        self._losses = channel.losses()
        self._asked: deque[tuple[int, _Asked]] = deque()
        self._worker_s: float | None = None

    @property
    def n_in_flight(self) -> int:
        """Questions without an answer."""
        return len(self._asked)

    def start_run(
        self,
        residual: NDArray[np.float32],
        position: int,
        *,
        want_state: bool,
        want_rows: bool = True,
        want_logits: bool = False,
    ) -> None:
        """Run the tail over residual f32 [n_tokens, n_embd]; what is wanted of it comes home with the answer.

        The array must not change afterwards. Raises LinkError.
        """
        n_tokens, n_embd = residual.shape
        assert residual.dtype == np.float32 and residual.flags.c_contiguous, (
            "residual is f32 [n_tokens, n_embd]"
        )
        want = (m.WANT_ROWS if want_rows else 0) | (m.WANT_STATE if want_state else 0)
        want |= m.WANT_LOGITS if want_logits else 0
        ticket = next(self._tickets)
        self._ask(ticket, m.RunChunk(self.link_epoch, ticket, position, n_tokens, n_embd, want), residual)

    def start_rewind(self, n: int) -> None:
        """Ask the mirror to go back to n; the answer says how far back it went. Raises LinkError."""
        ticket = next(self._tickets)
        self._ask(ticket, m.RewindMirror(self.link_epoch, ticket, n))

    def start_push(self, sections: Sequence[RowSection], n_after: int, *, with_state: bool) -> None:
        """Give the mirror rows it lacks, up to n_after, and with_state the recurrent state there. Raises LinkError."""
        blob = encode_rows(sections).joined()
        flags = m.ROWS_KV | (m.ROWS_STATE if with_state and self.rows.has_recurrent else 0)
        complete = with_state or not self.rows.has_recurrent
        ticket = next(self._tickets)
        message = m.PushRows(self.link_epoch, ticket, flags, n_after, len(blob))
        self._ask(ticket, message, blob, n_expected=n_after if complete else None)

    def start_pull_state(self, end: int) -> None:
        """Ask for the recurrent state at `end`, where the chunks in flight leave the mirror. Raises LinkError."""
        ticket = next(self._tickets)
        self._ask(ticket, m.PullRows(self.link_epoch, ticket, end, end, m.ROWS_STATE))

    def start_snapshot(self, n: int) -> None:
        """Have the worker keep the recurrent state at n, where chunks in flight leave the mirror. Raises LinkError."""
        ticket = next(self._tickets)
        self._ask(ticket, m.TakeSnapshot(self.link_epoch, ticket, n))

    def wait(self, timeout_s: float) -> TailRan | MirrorMoved | StatePulled | None:
        """The next answer, or None when none came within timeout_s. Raises LinkError, also when one is overdue."""
        if not self._asked:
            return None
        ticket, asked = self._asked[0]
        received = self._next_answer(ticket, timeout_s)
        if received is None:
            if self._channel.losses() != self._losses:
                raise LinkDownError("the bridge went away before it answered")
            self._check_deadline(asked)
            return None
        self._asked.popleft()
        answer = received.message
        if isinstance(answer, m.LinkFailed):
            raise _failure(answer)
        if answer.link_epoch != self.link_epoch:
            raise StaleEpochError(
                f"the worker answered in link epoch {answer.link_epoch}, asked in {self.link_epoch}"
            )
        if isinstance(asked.message, m.RunChunk):
            return self._tail_ran(asked.message, answer, received.frames)
        if isinstance(asked.message, m.PullRows):
            return self._state_pulled(asked.message, answer, received.frames)
        return self._mirror_moved(asked, answer)

    def abandon(self) -> None:
        """Nobody will take the answers in flight: they are dropped as late ones when they come."""
        self._asked.clear()
        self.mirror.distrust()

    def cancel(self) -> None:
        """As abandon, and the worker is told: it need not run the chunks in flight, and trims its mirror.

        Raises LinkError when it cannot be told.
        """
        chunks_in_flight = bool(self._asked)
        self.abandon()
        if chunks_in_flight:
            self.start_rewind(self.mirror.n)

    # --- inside

    def _ask(self, ticket: int, message: m.Message, *arrays: Any, n_expected: int | None = None) -> None:
        self._channel.send(message, *arrays)
        self._asked.append((ticket, _Asked(message, self._clock(), n_expected)))

    def _next_answer(self, ticket: int, timeout_s: float) -> Any | None:
        """The answer to `ticket`; answers to abandoned questions are dropped on the way."""
        until_s = self._clock() + timeout_s
        while True:
            received = self._channel.recv(max(0.0, until_s - self._clock()))
            if received is None:
                return None
            if received.message.ticket == ticket:
                return received
            if received.message.ticket > ticket:
                raise LinkError(
                    f"the worker answered ticket {received.message.ticket} before {ticket}", cause="order"
                )
            self.late_answers += 1

    def _check_deadline(self, asked: _Asked) -> None:
        waited_s = self._clock() - asked.at_s
        limit_s = answer_deadline_s(self._worker_s, len(self._asked))
        if waited_s > limit_s:
            raise LinkDeadlineError(
                f"no answer from the worker for {waited_s:.1f} s; the limit is {limit_s:.1f} s"
            )

    def _tail_ran(self, asked: m.RunChunk, answer: Any, frames: Sequence[Any]) -> TailRan:
        if not isinstance(answer, m.ChunkDone) or answer.n_tokens != asked.n_tokens:
            raise LinkError(
                f"asked the worker for {asked.n_tokens} tokens at {asked.position}, got {answer!r}",
                cause="count",
            )
        with_state = bool(asked.want & m.WANT_STATE)
        sections = _sections(frames) if asked.want & (m.WANT_ROWS | m.WANT_STATE) else []
        if asked.want & m.WANT_ROWS:
            self.rows.check(sections, asked.position, asked.position + asked.n_tokens, with_state=with_state)
        logits = self._logits(frames[1:], answer.n_logits) if asked.want & m.WANT_LOGITS else None
        self._worker_s = answer.compute_ms / 1000
        self.mirror.moved(asked.position + asked.n_tokens)
        return TailRan(
            asked.position,
            asked.n_tokens,
            sections,
            with_state,
            worker_s=self._worker_s,
            queue_s=answer.queue_ms / 1000,
            round_trip_s=answer.round_trip_ms / 1000,
            logits=logits,
        )

    def _logits(self, frames: Sequence[Any], n_logits: int) -> NDArray[np.float32]:
        if n_logits != self._n_vocab or not frames:
            raise LinkError(
                f"the worker gave {n_logits} logits; the vocabulary has {self._n_vocab}", cause="count"
            )
        logits = np.frombuffer(frames[0], np.float32)
        if not np.isfinite(logits).all():
            raise LinkError("the worker gave logits that are not finite", cause="nonfinite")
        return logits

    def _state_pulled(self, asked: m.PullRows, answer: Any, frames: Sequence[Any]) -> StatePulled:
        if not isinstance(answer, m.RowsPulled):
            raise LinkError(f"asked the worker for its state at {asked.p1}, got {answer!r}", cause="count")
        sections = _sections(frames)
        self.rows.check_state(sections, asked.p1)
        return StatePulled(asked.p1, sections)

    def _mirror_moved(self, asked: _Asked, answer: Any) -> MirrorMoved:
        if not isinstance(answer, m.MirrorAt):
            raise LinkError(f"asked the worker to move its mirror, got {answer!r}", cause="count")
        if isinstance(asked.message, m.RewindMirror):
            if answer.n_valid > asked.message.n:
                raise LinkError(
                    f"the mirror went to {answer.n_valid}, asked for {asked.message.n} at most", cause="range"
                )
            self.mirror.rewound(answer.n_valid)
        elif asked.n_expected is not None and answer.n_valid != asked.n_expected:
            raise LinkError(
                f"the mirror stands at {answer.n_valid} after a push up to {asked.n_expected}", cause="range"
            )
        elif isinstance(asked.message, m.TakeSnapshot):
            if answer.n_valid != asked.message.n:
                raise LinkError(
                    f"the mirror stands at {answer.n_valid}, thought to be at {asked.message.n}",
                    cause="range",
                )
        else:
            assert isinstance(asked.message, m.PushRows)
            self.mirror.moved(asked.message.n_valid_after)
        return MirrorMoved(self.mirror.n)


def _sections(frames: Sequence[Any]) -> list[RowSection]:
    try:
        return decode_rows(frames[0])
    except ProtocolError as error:
        raise LinkError(f"rows of the worker are damaged: {error}", cause="damaged") from error


def answer_deadline_s(worker_s: float | None, n_in_flight: int) -> float:
    """How long to wait for an answer when the last chunk took worker_s and n_in_flight are under way."""
    if worker_s is None:
        return FIRST_ANSWER_S
    return max(ANSWER_S_MIN, ANSWER_SLOWDOWN_MAX * worker_s * n_in_flight)


def _failure(answer: m.LinkFailed) -> LinkError:
    """The LinkError that says what the bridge said."""
    text = f"{answer.cause}: {answer.detail}"
    if answer.code == LinkDownError.code:
        return LinkDownError(text)
    if answer.code == LinkDeadlineError.code:
        return LinkDeadlineError(text)
    if answer.code == StaleEpochError.code:
        return StaleEpochError(text)
    return LinkError(text, cause=answer.cause)
