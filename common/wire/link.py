"""The link: who may say what when, on either end of one binary channel. Frames in, events out; no socket, no clock.

Host and worker run this same object from opposite ends; it knows its role only to tell "may I say this" from
"may they say this". The tables are in `grammar`. Time is passed in. What a chunk means, and whether its position fits
the mirror, is the worker's business; how bytes become frames is `stream`'s.

One mistake of the peer's ends the connection: `receive` raises RemoteProtocolError, the caller says so once
(`farewell`) and closes. Two things do not: a stale epoch (dropped, counted) and a wrong hash (`Refused`: the operation
is discarded whole and the asker told).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import HashMismatchError, LocalProtocolError, OutriggerError, RemoteProtocolError
from common.limits import CHUNK_TOKENS_MAX, CHUNK_WINDOW_MAX, FRAME_BYTES_MAX, MIB
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.deadlines import AckClock
from common.wire.frames import (
    EXT_HDR,
    EXTENSION_TYPE_MIN,
    Frame,
    decode,
    encode,
    split_stamp,
    stamp_hash,
)
from common.wire.grammar import RESIDUAL_RULES, Phase, Role, Rules
from common.wire.stream import RawFrame

CHUNK_HEAD_BYTES = EXT_HDR.size + ext.Chunk2.LAYOUT.size


@dataclass(slots=True)
class Pending:
    """A request that is not answered yet. `tag` is the sender's own; `due_at` is on the caller's clock."""

    seq: int
    request: type[Frame]
    n_tokens: int
    sent_at: float
    due_at: float
    tag: Any = None


class Arrived(NamedTuple):
    """A frame the grammar allows. `request` is what it answers, if it is an answer; `seq` its own number."""

    frame: Frame
    seq: int
    request: Pending | None = None


@dataclass(frozen=True)
class Refused:
    """A request whose hash was wrong: nothing in it may be used. The worker answers frame `seq` with ERR2."""

    seq: int
    error: OutriggerError


class Link:
    """One connection of the residual channel; `attention_link` has the other channel's.

    `window` is the most unanswered chunks this side sends (host) or takes (worker).
    """

    rules: Rules = RESIDUAL_RULES
    noted: frozenset[type[Frame]] = frozenset((base.Hello, base.Hello2, ext.Hello3, ext.Hello3Ok))
    """What later frames are measured by, see `_note`."""

    def __init__(
        self,
        role: Role,
        *,
        window: int = CHUNK_WINDOW_MAX,
        clock: AckClock | None = None,
    ) -> None:
        self.role, self._other = role, role.other
        self.channel = self.rules.channel
        self.phase = Phase.OPEN
        self.window = window
        self.epoch = 0
        self.n_embd = 0
        self.peer_bytes_max = FRAME_BYTES_MAX
        """Longest frame the other side takes, from its hello."""
        self.pending: deque[Pending] = deque()
        self.counts: Counter[str] = Counter()
        """stale_epoch, bad_hash: frames that were not used."""
        self.clock = clock or AckClock()
        self._seq_sent = 0
        self._seq_seen = 0
        self._base_seq = 0
        self._pings_out = 0  # sent and not answered
        self._pings_in = 0  # received and not answered
        self._heard_extension = False

    # --- questions

    @property
    def idle(self) -> bool:
        """Both sides greeted and nothing is unanswered: the only time to send a PING."""
        return self.phase in (Phase.BASE, Phase.EXTENDED) and not self.pending

    def room(self, request: type[Frame]) -> bool:
        """Whether a request of this class may be sent now."""
        if not self.pending:
            return True
        rules = self.rules
        if request in rules.pipelined:
            beside = rules.pipelined if rules.mixed else (request,)
            return len(self.pending) < self.window and all(p.request in beside for p in self.pending)
        overtaken = rules.overtaking.get(request)
        return all(p.request is overtaken for p in self.pending)

    def due_at(self) -> float | None:
        """When the oldest unanswered request becomes a failure; None when nothing is unanswered."""
        return self.pending[0].due_at if self.pending else None

    def bytes_max(self, frame_type: int) -> int:
        """Longest payload of this type that may come now. For FrameReader: asked before anything is allocated."""
        bound = self.channel.bytes_max(frame_type)
        if frame_type not in self.rules.allowed_types[self.phase, self.role.other]:
            raise RemoteProtocolError(
                f"frame type {frame_type} may not come while the link is {self.phase.value}"
            )
        return self._bound(frame_type, bound)

    def _bound(self, frame_type: int, bound: int) -> int:
        """`bound`, or less where what was said before tells how long such a frame may be."""
        if frame_type in (base.Chunk.TYPE, ext.Chunk2.TYPE):
            return min(bound, CHUNK_HEAD_BYTES + CHUNK_TOKENS_MAX * self.n_embd * 4)
        return bound

    # --- sending

    def send(self, frame: Frame, now: float, *, epoch: int = 0, tag: Any = None) -> list[memoryview]:
        """Buffers of `frame`, which counts as sent from here on. `epoch` names the link's life (HELLO3 only).

        Raises LocalProtocolError when it may not be said now; the link is then as before.
        """
        cls, rules = type(frame), self.rules
        following = self._follow(self.role, frame, LocalProtocolError)
        request, is_ping = cls in rules.answers, cls in rules.ping
        if (request and not self.room(cls)) or (is_ping and cls is rules.ping[0] and self.pending):
            raise LocalProtocolError(f"{frame.NAME} while {len(self.pending)} requests are unanswered")
        if is_ping and cls is rules.ping[1] and not self._pings_in:
            raise LocalProtocolError("PONG without PING")
        if cls is rules.hello3[0] and not epoch:
            raise LocalProtocolError("HELLO3 needs an epoch other than 0")
        self._check_shape(frame, LocalProtocolError)
        buffers = encode(self.channel, frame, epoch=epoch or self.epoch, seq=self._seq_sent + 1)
        n_bytes = sum(map(len, buffers))
        if n_bytes > self.peer_bytes_max:
            raise LocalProtocolError(f"{frame.NAME} of {n_bytes} bytes; the peer takes {self.peer_bytes_max}")
        if self.role is Role.WORKER and cls in rules.answering:
            self._settle(frame, LocalProtocolError)
        self.epoch = epoch or self.epoch
        self._seq_sent += cls.stamped
        if is_ping:
            self._pings_out += cls is rules.ping[0]
            self._pings_in -= cls is rules.ping[1]
        if request:
            self._pend(cls, self._work(frame), self._seq_sent, now, n_bytes, tag)
        if cls in self.noted:
            self._note(frame)
        self.phase = following
        return buffers

    def farewell(self, error: OutriggerError, n_valid: int = 0) -> list[memoryview]:
        """The worker's last word before it closes because of `error`: ERR2 or ERR, whichever the peer understands."""
        self.phase = Phase.CLOSED
        complaint = self.rules.err2.of(0, error.code, n_valid, str(error))
        if not self._heard_extension:
            return encode(self.channel, self.rules.err(complaint.text))
        return encode(self.channel, complaint, epoch=self.epoch, seq=self._seq_sent + 1)

    # --- receiving

    def receive(self, raw: RawFrame, now: float) -> Arrived | Refused | None:
        """What `raw` means. None: it belongs to an earlier epoch, was counted and must not be used.

        Raises RemoteProtocolError; the link must then be closed.
        """
        if raw.type not in self.rules.allowed_types[self.phase, self._other]:
            self.bytes_max(raw.type)  # says what is wrong
        stamp, body = split_stamp(raw.type, raw.payload)
        if stamp is not None:
            self._heard_extension = True
            if self.phase is Phase.OPEN:
                self.epoch = stamp.epoch
            digest = raw.digest
            if digest is None:
                digest = stamp_hash(raw.type, stamp.epoch, stamp.seq, (body,))
            if digest != stamp.xxh3:
                return self._refuse(raw, now)
            if stamp.epoch != self.epoch:
                self.counts["stale_epoch"] += 1
                return None
            self._count_seq(stamp.seq)
        frame = decode(self.channel, raw.type, body)
        following = self._follow(self._other, frame, RemoteProtocolError)
        self._check_shape(frame, RemoteProtocolError)
        arrived = self._book(frame, now, len(raw.payload))
        if type(frame) in self.noted:
            self._note(frame)
        self.phase = following
        return arrived

    def _book(self, frame: Frame, now: float, n_bytes: int) -> Arrived:
        """Enter a request that came, or settle the one that `frame` answers."""
        cls, rules = type(frame), self.rules
        if cls in rules.ping:
            pong = cls is rules.ping[1]
            if pong and not self._pings_out:
                raise RemoteProtocolError("PONG without PING")
            self._pings_out -= pong
            self._pings_in += not pong
        if cls not in rules.answers:
            answers = self.role is Role.HOST and cls in rules.answering
            answered = self._settle(frame, RemoteProtocolError) if answers else None
            return Arrived(frame, self._seq_seen, answered)
        if not self.room(cls):
            raise RemoteProtocolError(f"{frame.NAME} while {len(self.pending)} requests are unanswered")
        pending = self._pend(cls, self._work(frame), self._seq_seen, now, n_bytes)
        return Arrived(frame, pending.seq)

    def _refuse(self, raw: RawFrame, now: float) -> Refused:
        """A wrong hash. A request is refused; a greeting or an answer that cannot be trusted ends the link."""
        error = HashMismatchError(
            f"the hash of a frame of type {raw.type} ({len(raw.payload)} bytes) is wrong"
        )
        self.counts["bad_hash"] += 1
        request = self.channel.frames[raw.type][0]
        if request not in self.rules.answers or self.phase is not Phase.EXTENDED:
            raise error
        # Frames are numbered without gaps, so this is the next one, whatever its header says.
        self._seq_seen += 1
        return Refused(self._pend(request, 0, self._seq_seen, now, len(raw.payload)).seq, error)

    def _count_seq(self, seq: int) -> None:
        if seq != self._seq_seen + 1:
            raise RemoteProtocolError(f"frame {seq} came after frame {self._seq_seen}: there is a gap")
        self._seq_seen = seq

    def _work(self, frame: Frame) -> int:
        """How much a request computes, in the unit of the clock's pace: tokens."""
        return getattr(frame, "n_tok", 0)

    def _learn(self, answer: Frame, answered: Pending) -> None:
        """Take in the pace that an answer tells. Raises nothing."""
        if isinstance(answer, (base.ChunkAck, ext.Chunk2Ack)):
            self.clock.learn(answer.n_tok, answer.compute_ms)

    def _check_shape(self, frame: Frame, error: type[OutriggerError]) -> None:
        """Compare a chunk's width with the model's: the codec cannot know it."""
        if isinstance(frame, (base.Chunk, ext.Chunk2)):
            expected = frame.n_tok * self.n_embd * base.DTYPE_BYTES[frame.dtype]
            if frame.residual.n_bytes != expected:
                raise error(
                    f"{frame.NAME} of {frame.residual.n_bytes} bytes; {frame.n_tok} tokens have {expected}"
                )

    # --- both

    def _follow(self, who: Role, frame: Frame, error: type[OutriggerError]) -> Phase:
        following = self.rules.grammar[self.phase].get((who, type(frame)))
        if following is None:
            raise error(f"{who.value} may not say {frame.NAME} while the link is {self.phase.value}")
        return following

    def _note(self, frame: Frame) -> None:
        """Remember what later frames are measured by."""
        if isinstance(frame, (base.Hello, ext.Hello3)):
            self.n_embd = frame.n_embd
        if isinstance(frame, ext.Hello3Fields):
            self.window = min(self.window, frame.window)
            self.peer_bytes_max = min(self.peer_bytes_max, frame.frame_mib_max * MIB)

    def _pend(
        self, request: type[Frame], n_tokens: int, stamped_seq: int, now: float, n_bytes: int, tag: Any = None
    ) -> Pending:
        """Extension requests are named by their own number, base requests by a count of their own."""
        self._base_seq += request.TYPE < EXTENSION_TYPE_MIN
        seq = stamped_seq if request.TYPE >= EXTENSION_TYPE_MIN else self._base_seq
        ahead = sum([pending.n_tokens for pending in self.pending])
        due_at = now + self.clock.allowance_s(n_tokens, ahead, n_bytes)
        pending = Pending(seq, request, n_tokens, now, due_at, tag)
        self.pending.append(pending)
        return pending

    def _settle(self, frame: Frame, error: type[OutriggerError]) -> Pending | None:
        """Take the request that `frame`, one of `rules.answering`, answers off the list; None: it answers none."""
        rules, cls = self.rules, type(frame)
        failure = cls is rules.err or cls is rules.err2
        if cls is rules.err2 and frame.answers == 0:  # type: ignore[attr-defined]
            return None
        if not self.pending:
            if failure and self.phase is not Phase.EXTENDED:
                return None  # a complaint about the greeting, or about the connection
            raise error(f"{frame.NAME} answers nothing")
        oldest = self.pending[0]
        if not failure and rules.answers[oldest.request] is not cls:
            raise error(f"{frame.NAME} does not answer {oldest.request.NAME}")
        if frame.stamped and frame.answers != oldest.seq:  # type: ignore[attr-defined]
            raise error(f"{frame.NAME} answers frame {frame.answers}; frame {oldest.seq} is next")  # type: ignore[attr-defined]
        if getattr(frame, "n_tok", oldest.n_tokens) != oldest.n_tokens:
            raise error(f"{frame.NAME} speaks of {frame.n_tok} tokens; {oldest.n_tokens} were asked")  # type: ignore[attr-defined]
        self.pending.popleft()
        self._learn(frame, oldest)
        return oldest


assert EXTENSION_TYPE_MIN == ext.Hello3.TYPE
