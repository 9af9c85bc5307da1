"""A prompt and its answer where the tail layers are on the worker alone: the read goes on through the answer.

Ubatches of the prompt go through the head layers here and the tail layers there, on the same grid as ever; no rows
come home; the last one brings logits. Every token of the answer is one more row. Whatever a later prompt goes back to
must be reachable on both sides: the worker is asked how far back it went, and the head goes back as far.

After a loss everything is read again, in exactly the pieces it was first computed in: the prompt in its ubatches,
every token of the answer as a row of its own. So the rows have the same bits, and the answer goes on as it would have.
Made by services.mac.split_decode; called by services.mac.lane on the compute thread.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from common.errors import LinkError
from common.log import get_log
from common.wire.messages import ReadReport
from services.mac.grid import Ubatch, cut_read
from services.mac.mirror import Rewind
from services.mac.remote_span import RemoteSpan, TailRan
from services.mac.sequence import HeldSequence
from services.mac.stopwatch import ReadClock

if TYPE_CHECKING:
    from services.mac.split_decode import SplitDecoding

LOSSES_MAX = 5
"""Failures of the worker without one new token between them, after which a request fails."""
HOPELESS = ("refused",)
"""Causes of failure that another attempt would meet again."""

log = get_log()


class SplitRead:
    """Reads `tokens` i32 [n_prompt] from `start` on. `logits` f32 [n_vocab] is of the newest token; None until then."""

    def __init__(
        self, sequence: HeldSequence, tokens: NDArray[np.int32], start: int, decoding: SplitDecoding
    ) -> None:
        self.sequence, self.tokens = sequence, tokens
        self.logits: NDArray[np.float32] | None = None
        self.fallbacks: list[str] = []
        self._decoding = decoding
        self._clock = ReadClock(decoding.clock)
        self._remote: RemoteSpan | None = None
        self._absent_since: float | None = None
        self._n_losses = 0
        self._answer: list[int] = []
        self._start = start
        """Where the prompt's read began, and what was reused therefore."""
        self._n_known = 0
        """Tokens whose pieces are through all layers, or were before a loss."""
        self._tokens_reread = 0
        self._head_s = self._worker_s = 0.0
        """Of the answer's tokens, each counted once."""
        self._begin(start)

    def _begin(self, at: int) -> None:
        """From `at` on everything is to be run (again)."""
        n_prompt = len(self.tokens)
        answer = [Ubatch(n_prompt + index, 1) for index in range(len(self._answer))]
        self._pieces = [*cut_read(at, n_prompt), *answer]
        self._n_heads = self._n_sent = self._n_home = 0
        self._kept: deque[NDArray[np.float32]] = deque()
        """Residuals that were not sent yet."""
        self._in_place = False
        """The worker's mirror stands where the first piece begins."""
        if not self._prompt_done:
            self._start = at
            self._clock.restart()

    # --- for the lane

    @property
    def tokens_done(self) -> int:
        """Prompt tokens that are through all layers, reused ones included."""
        home = self._pieces[self._n_home - 1].end if self._n_home else self._pieces[0].position
        return min(home, len(self.tokens))

    @property
    def waits(self) -> bool:
        """There is nothing to compute before the worker's next answer."""
        return self._remote is not None and bool(self._remote.n_in_flight) and not self._head_may_run

    def advance(self, wait_s: float) -> None:
        """Do the next piece of work; call until `logits` is there.

        Failures of the worker are dealt with here; LinkError when there is no hope left.
        """
        if self._remote is None:
            self._meet_worker(wait_s)
            return
        try:
            self._go_on(self._remote, wait_s)
        except LinkError as error:
            self._lose(self._remote, error)

    def follow(self, sequence: HeldSequence, token_id: int, position: int) -> NDArray[np.float32] | None:
        """The logits after one generated token; None: `advance` until they are there, and ask again."""
        assert sequence is self.sequence
        if position == len(self.tokens) + len(self._answer):
            self._answer.append(token_id)
            self._pieces.append(Ubatch(position, 1))
            self.logits, self._n_losses = None, 0
        return self.logits

    def abandon(self) -> None:
        """Nobody wants this read any more: the worker is told so, and answers still in flight will be dropped."""
        if self._remote is not None:
            try:
                self._remote.cancel()
            except LinkError as error:
                log.info("worker could not be told of a cancelled read", error=str(error))

    def report(self) -> ReadReport:
        """Where the tokens were computed and how long it took, so far."""
        return ReadReport(
            tokens_cache=self._start,
            tokens_worker=len(self.tokens) - self._start,
            split_layer=self.sequence.whole.last,
            fallbacks=tuple(self.fallbacks),
            tokens_reread=self._tokens_reread,
            prefill_s=self._clock.elapsed_s,
            wait_s=self._clock.wait_s,
            stages=self._clock.stages(),
            decode_head_s=self._head_s,
            decode_worker_s=self._worker_s,
        )

    # --- the worker comes and goes

    @property
    def _prompt_done(self) -> bool:
        return self._n_known >= len(self.tokens)

    def _meet_worker(self, wait_s: float) -> None:
        self._remote = self._decoding.span_for(self.sequence)
        if self._remote is not None:
            self._absent_since = None
            return
        now = self._decoding.clock()
        if self._absent_since is None:
            self._absent_since = now
        self._decoding.await_worker(now - self._absent_since, wait_s)

    def _lose(self, remote: RemoteSpan, error: LinkError) -> None:
        remote.abandon()
        self._remote = None
        self._decoding.fell_back(self.sequence, error)
        self.fallbacks.append(error.cause)
        self._n_losses += 1
        if error.cause in HOPELESS or self._n_losses > LOSSES_MAX:
            raise error
        self._begin(self.sequence.retreat(0))

    # --- with the worker

    def _go_on(self, remote: RemoteSpan, wait_s: float) -> None:
        while remote.n_in_flight and self._take(remote, 0.0):
            pass
        if self.logits is not None:
            return
        if not self._in_place and not remote.n_in_flight:
            self._find_common_point(remote)
        self._send_ready(remote)
        if self._head_may_run:
            self._run_head()
            self._send_ready(remote)
        elif remote.n_in_flight:
            self._take(remote, wait_s)

    def _find_common_point(self, remote: RemoteSpan) -> None:
        """One step towards a point at which the mirror and the head layers both stand."""
        at = self._pieces[0].position
        sync = remote.mirror.next_sync(at, tokens_per_push=1)
        if sync is None:
            self._in_place = True
        elif isinstance(sync, Rewind):
            remote.start_rewind(sync.n)
        else:  # the mirror went further back: the rows between are nowhere but in the tokens
            self._begin(self.sequence.retreat(remote.mirror.n))

    @property
    def _head_may_run(self) -> bool:
        window = self._remote.window if self._remote else 1
        return self._in_place and self._n_heads < len(self._pieces) and len(self._kept) < window

    def _send_ready(self, remote: RemoteSpan) -> None:
        """Send the residuals at hand as far as the window goes, and where a state is to be kept, say so."""
        while self._kept and self._n_sent - self._n_home < remote.window:
            piece = self._pieces[self._n_sent]
            is_last = self._n_sent + 1 == len(self._pieces)
            if not self._prompt_done:
                self._clock.sent(self._n_sent)
            remote.start_run(
                self._kept.popleft(), piece.position, want_state=False, want_rows=False, want_logits=is_last
            )
            self._n_sent += 1
            if remote.rows.has_recurrent and self.sequence.wants_state(piece.end):
                remote.start_snapshot(piece.end)

    def _run_head(self) -> None:
        piece = self._pieces[self._n_heads]
        n_prompt = len(self.tokens)
        if piece.position < n_prompt:
            ids = self.tokens[piece.position : piece.end]
        else:
            ids = np.array([self._answer[piece.position - n_prompt]], np.int32)
        if self._prompt_done:
            started_s = self._decoding.clock()
            self._kept.append(self.sequence.whole.run(ids, piece.position))
            if piece.end > self._n_known:
                self._head_s += self._decoding.clock() - started_s
        else:
            with self._clock.head(piece):
                self._kept.append(self.sequence.whole.run(ids, piece.position))
        self.sequence.note(0, piece.end)
        self._n_heads += 1

    def _take(self, remote: RemoteSpan, wait_s: float) -> bool:
        """Take the next answer; False when none came."""
        if self._prompt_done:
            answer = remote.wait(wait_s)
        else:
            with self._clock.waiting():
                answer = remote.wait(wait_s)
        if isinstance(answer, TailRan):
            self._came_home(answer)
        return answer is not None

    def _came_home(self, answer: TailRan) -> None:
        was_reading, is_new = not self._prompt_done, answer.end > self._n_known
        if was_reading:
            with self._clock.taken_home(self._n_home, answer):
                pass
        elif is_new:
            self._worker_s += answer.worker_s
        self._tokens_reread += 0 if is_new else answer.n_tokens
        self._n_known = max(self._n_known, answer.end)
        self._n_home += 1
        if self._n_home == len(self._pieces):
            self.logits = answer.logits
        if was_reading and self._prompt_done:
            self._clock.stop()
            self._decoding.on_read(self.report())
