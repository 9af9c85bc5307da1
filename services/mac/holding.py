"""Holding: what the main sequence does with its old pages: into the journal, out of memory, back when they are needed.

Near the limit a conversation with the broker begins and every full page goes to the journal. What the broker then says
may go, goes at the border of a ubatch; from there on those groups are attended by workers, or from the journal's files.
A page leaves memory only when the journal named its place. Rows that a later read may compute anew (an answer's) are
journaled under ids that no prompt has, so that they serve this sequence and are never found by another.
Used by compute.py, lane.py and sequence.py, on the compute thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray

from common.attention.partial import PartialAttention
from common.engine.kv_source import KvSource, PageQuery
from common.engine.local_pages import LocalPages
from common.engine.sequence import EngineSequence
from common.errors import EngineError, HashMismatchError, OutOfMemoryError, OutriggerError
from common.limits import UBATCH_TOKENS
from common.log import get_log
from common.state.page_memory import PageMemory
from common.wire import held as h
from common.wire.rows import RowSection, decode_rows, encode_rows
from services.mac.hold_channel import Asks, HoldChannel
from services.mac.remote_pages import Counts, HeldGroups, HeldWorker, HeldWorkers

OPEN_S = 20.0
"""How long a read waits for what the journal may have of its prompt."""
FULL_S = 30.0
"""How long a request waits for memory, or for the journal, before it fails."""
ROOM_S_MAX = 30.0
"""How long after its start the host does not know what the journal takes, and reads prompts nevertheless."""
LOOK_S = 1.0
"""Between two looks at a mapped page: whether its file still has the bytes that were kept."""
NEAR_GROUPS = 2
"""The conversation begins so many groups before the limit."""

log = get_log()


class PagesLostError(EngineError):
    """Pages that are needed cannot be had, or are not what was kept: the sequence must be read anew."""


class Holding:
    """The pages of one sequence. `limit`: the position from which on reads go by pages, and memory may go."""

    def __init__(
        self,
        sequence: EngineSequence,
        form: h.PageForm,
        limit: int,
        asker: Asks,
        workers: list[HeldWorker],
        counts: Counts,
        *,
        shadow_every: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """sequence: of an engine whose ubatches from `limit` on go by pages. Raises EngineError when it has none."""
        self.form, self.limit = form, limit
        self.memory = PageMemory(sequence.state)
        self.channel = HoldChannel(asker, form, self._placed, clock)
        self._sequence, self._counts, self._clock = sequence, counts, clock
        self._whole = sequence.span(0, sequence.spec.layers.stop)
        self._files = sequence.pages_elsewhere(lambda layer, page: self.channel.places[layer, page])
        self._workers = HeldWorkers(
            workers, self._attend, counts, self._erred, shadow_every, clock, check_here=self._check
        )
        self._look_at_s = clock() + LOOK_S
        self._ids = np.zeros(sequence.n_ctx, np.int32)
        self._keep_max = sequence.n_ctx
        self._told: tuple[int, ...] | None = None
        self._room_by_s = clock() + ROOM_S_MAX
        self._full_since_s: float | None = None
        self._state_at = 0
        self._has_recurrent = any(sequence.spec.kind(n) == "recurrent" for n in sequence.spec.layers)
        self._resumes = set(sequence.spec.kinds) <= {"attention", "recurrent"}
        """Other layers' rows are not in the pages."""
        sequence.set_sources(self._choose)

    # --- what holds now

    @property
    def n_tokens(self) -> int:
        """Positions of the sequence."""
        return self._whole.n_valid

    @property
    def group_released(self) -> int:
        """Groups before it are in memory no more."""
        return self.memory.released // self.form.group_pages

    @property
    def n_remote(self) -> int:
        """Of these, how many a worker holds."""
        return self._workers.n_placed(self.group_released)

    @property
    def n_ctx(self) -> int:
        """Tokens of context that there is room for: the limit, and what the journal takes.

        A broker that just begins has not said it yet: then a prompt is not refused, but read until it is known.
        """
        room = self.channel.standing.room
        if room is None and self._clock() < self._room_by_s:
            return self._sequence.n_ctx
        return min(self._sequence.n_ctx, self.limit + (room.tokens_journal if room else 0))

    @property
    def is_busy(self) -> bool:
        """Pages are on their way, or wait for it: `step` has something to do soon."""
        return self.channel.bytes_in_flight > 0

    def pauses_at(self, position: int) -> bool:
        """Whether something is to be done when the sequence stands there, so that a ubatch must end there."""
        return self._has_recurrent and position % self.form.group_tokens == 0

    # --- the sequence tells

    def reads(self, ids: NDArray[np.int32]) -> None:
        """These tokens are going to be, or are, the first of the sequence."""
        self._ids[: len(ids)] = ids
        self._keep_max = self._sequence.n_ctx

    def keeps_only(self, n_tokens: int) -> None:
        """Positions from n_tokens on come and go (several answers take turns there): they stay in memory."""
        self._keep_max = n_tokens

    def decoded(self, token_id: int, position: int) -> None:
        """One more token."""
        self._ids[position] = token_id

    def rewinds(self, point: int) -> None:
        """The sequence goes back to `point` now. Raises PagesLostError when pages it needs for that are lost."""
        self._full_since_s = None
        self._state_at = min(self._state_at, point)
        if point == 0:
            self._files.close()
            self._workers.limit(0)
            self.channel.close()
            self._counts.pages_waiting(0)
            return
        if point < self.n_tokens:
            self._recall(point)
            page = point // self.form.page_tokens
            self._files.forget(page)
            self._workers.limit(point // self.form.group_tokens)
            self.channel.cut(point)
            self._counts.pages_waiting(self.channel.n_in_flight)

    def _recall(self, point: int) -> None:
        """Have in memory what a sequence of `point` tokens has there: all of it below the limit."""
        first = 0 if point < self.limit else point // self.form.group_tokens * self.form.group_pages
        if first >= self.memory.released:
            return
        end = -(-point // self.form.page_tokens)
        n_pages = max(0, min(end, self.memory.released) - first)
        try:
            self.memory.recall(first, self._image, end=end)
        except (OutriggerError, OSError, KeyError) as error:
            raise PagesLostError(f"pages before {point} are lost: {error}") from error
        self._counts.pages_recalled(n_pages * len(self.form.layers))

    # --- at the border of a ubatch

    def step(self, n_canonical: int) -> None:
        """Hear the broker, hand over full pages, obey releases. n_canonical: rows before it are a read's own.

        Raises PagesLostError when pages that nobody but the journal has turn out damaged.
        """
        channel, n_tokens = self.channel, self.n_tokens
        channel.hear()
        self._mind_lost_pages()
        is_near = n_tokens >= self.limit - NEAR_GROUPS * self.form.group_tokens and self.memory.n_full
        if channel.standing.room is not None and not is_near:
            return
        if channel.open(self._ids[:n_tokens].copy()):
            self._hand_over(n_canonical)
            self._keep_state(n_tokens, n_canonical)
            self._obey(n_tokens)
            self._tell(n_tokens)
        self._counts.pages_waiting(channel.n_in_flight)

    def wait(self, timeout_s: float, n_canonical: int) -> None:
        """As step(), after waiting for the broker's next word. Raises PagesLostError."""
        self.channel.hear(timeout_s)
        self.step(n_canonical)

    def has_room(self, n_more: int) -> bool:
        """Whether n_more tokens fit in memory now; if not, wait, and ask again.

        Raises OutOfMemoryError once that has lasted for FULL_S.
        """
        resident = self.n_tokens + n_more - self.memory.released * self.form.page_tokens
        is_kept = self.channel.is_open and not self.channel.standing.refused
        spare = 0 if is_kept else self.form.group_tokens  # to get over a broker that comes back
        whole = max(
            self.limit, self.form.group_tokens
        )  # the newest token's group stays, however large groups are
        if resident <= whole + spare + 2 * UBATCH_TOKENS:
            self._full_since_s = None
            return True
        now = self._clock()
        self._told = None  # the broker must know how far we are, between borders of pages, too
        if self._full_since_s is None:
            self._full_since_s = now
        if now - self._full_since_s < FULL_S:
            return False
        self._full_since_s = None
        why = self.channel.standing.refused or (
            "it is too slow" if self.channel.is_open else "no broker answers"
        )
        raise OutOfMemoryError(
            f"the host's memory for keys and values is full ({self.limit} tokens, host.kv_host_tokens) and the journal "
            f"took no more for {FULL_S:.0f} s: {why}; shorten the conversation, or "
            f"give the journal room (broker.journal_mib)"
        )

    def _hand_over(self, n_canonical: int) -> None:
        pt = self.form.page_tokens
        for page in range(min(self.memory.n_full, self._keep_max // pt)):
            for layer in self.form.layers:
                if self.channel.wants(layer, page) and not self._keep(layer, page, n_canonical):
                    return

    def _keep(self, layer: int, page: int, n_canonical: int) -> bool:
        pt, form = self.form.page_tokens, self.form
        ids = self._ids[page * pt : (page + 1) * pt].copy()
        if (page + 1) * pt > n_canonical:
            ids = ~ids
        if page >= self.memory.released:
            # copies: what is sent waits in a pipe, and the memory may be another sequence's by then
            image = self.memory.copied_image(layer, page)
        else:  # a new broker knows this page by its content only
            try:
                whole = self._image(layer, page)
            except (OutriggerError, OSError, KeyError) as error:
                raise PagesLostError(f"page {page} of layer {layer} is lost: {error}") from error
            image = whole[: form.key_bytes], whole[form.key_bytes :]
        return self.channel.keep(layer, page, image, ids)

    def _keep_state(self, n_tokens: int, n_canonical: int) -> None:
        if not self.pauses_at(n_tokens) or n_tokens != n_canonical or n_tokens <= self._state_at:
            return
        sections = self._whole.export_rows(0, 0, kv=False, state=True)
        blob = np.frombuffer(encode_rows(sections).joined(), np.uint8)
        self.channel.keep_state(n_tokens, blob, self._ids[:n_tokens].copy())
        self._state_at = n_tokens

    def _obey(self, n_tokens: int) -> None:
        asked = self.channel.standing.release
        if asked is None or n_tokens < self.limit:
            return
        end = min(
            asked.group_end, (n_tokens - 1) // self.form.group_tokens, self._groups_kept(asked.group_end)
        )
        n_bytes = self.memory.release(end * self.form.group_pages)
        if n_bytes:
            log.info("pages released", groups=self.group_released, bytes=n_bytes)
        self.channel.released(asked, self.group_released)

    def _groups_kept(self, end: int) -> int:
        """Groups [0, n) of which the journal has every page."""
        gp, places = self.form.group_pages, self.channel.places
        for page in range(self.memory.released, end * gp):
            if any((layer, page) not in places for layer in self.form.layers):
                return page // gp
        return end

    def _tell(self, n_tokens: int) -> None:
        pt = self.form.page_tokens  # a page may go once it is full, and once the newest token is behind it
        now = self.channel.conversation, self.group_released, n_tokens // pt, (n_tokens - 1) // pt
        if now != self._told and self.channel.holds(self.group_released, n_tokens):
            self._told = now

    # --- after a start: what the journal has of a prompt

    def look_up(self, prompt: NDArray[np.int32], n_max: int) -> int:
        """The last position <= n_max at which the journal lets `prompt` i32 [n_tokens] resume; 0: nowhere.

        The sequence at hand is given up by asking. Waits up to OPEN_S.
        """
        if not self._resumes:
            return 0
        self.channel.hear()
        self._files.close()
        self._workers.limit(0)
        self.channel.close()
        if not self.channel.open(prompt, OPEN_S) or (opened := self.channel.opened) is None:
            return 0
        by_page: dict[int, int] = {}
        for place in opened.places:
            by_page[place.page] = by_page.get(place.page, 0) + 1
        n_pages = 0
        while by_page.get(n_pages) == len(self.form.layers):
            n_pages += 1
        step = math.lcm(self.form.page_tokens, UBATCH_TOKENS)
        n = min(n_pages * self.form.page_tokens, n_max) // step * step
        if self._has_recurrent:
            return (
                opened.state_position
                if opened.state_position <= n and not opened.state_position % step
                else 0
            )
        return n

    def resume(self, prompt: NDArray[np.int32], n: int) -> None:
        """Have an empty sequence stand behind the first `n` tokens of the prompt. Raises PagesLostError."""
        opened, group = self.channel.opened, self.form.group_tokens
        assert opened is not None, "looked up before"
        n_groups = min(-(-(n + group - self.limit) // group), (n - 1) // group) if n >= self.limit else 0
        self.reads(prompt)
        try:
            states = self._states(opened) if self._has_recurrent else []
            self.memory.resume(n, max(0, n_groups) * self.form.group_pages, self._files.image)
            self._whole.import_rows(states, n)
        except (OutriggerError, OSError, KeyError) as error:
            raise PagesLostError(f"the journal's pages cannot be used: {error}") from error
        n_pages = n // self.form.page_tokens - self.memory.released
        self._counts.pages_recalled(n_pages * len(self.form.layers))
        self.channel.cut(n)
        self._state_at = n
        log.info("conversation resumed from the journal", tokens=n, groups_released=n_groups)

    @staticmethod
    def _states(opened: h.ConversationOpened) -> list[RowSection]:
        path, at = opened.state_path, opened.state_offset
        blob = np.fromfile(path, np.uint8, opened.state_bytes, offset=at)
        if xxhash.xxh3_64_intdigest(blob) != opened.state_xxh3:
            raise HashMismatchError(f"the recurrent state in {path} at {at} is not what was kept")
        return decode_rows(blob)

    # --- damage

    def _mind_lost_pages(self) -> None:
        """Keep anew what the broker found damaged and is in memory here; look for more."""
        lost, self.channel.standing.lost = self.channel.standing.lost, []
        for layer, page in lost:
            if page < self.memory.released:
                raise PagesLostError(f"page {page} of layer {layer} is damaged in the journal")
            log.warning("a page is damaged in the journal and kept anew", layer=layer, page=page)
        if (now := self._clock()) >= self._look_at_s:
            self._look_at_s = now + LOOK_S
            try:
                self._files.check_next()
            except HashMismatchError as error:
                raise PagesLostError(str(error)) from error

    def _image(self, layer: int, page: int) -> NDArray[np.uint8]:
        """A page's bytes from the journal, hashed now: what is altered after it was mapped must not be kept as new."""
        self._files.check(layer, range(page, page + 1))
        return self._files.image(layer, page)

    def _check(self, layer: int, group: int) -> None:
        """Whether we have the pages of a group as they were kept: a worker is not to blame for ours."""
        n = self.form.group_pages
        try:
            self._files.check(layer, range(group * n, (group + 1) * n))
        except HashMismatchError as error:
            raise PagesLostError(str(error)) from error

    def _attend(self, query: PageQuery, groups: range) -> Iterator[PartialAttention]:
        try:
            yield from self._files.attend(query, groups)
        except (HashMismatchError, OSError, KeyError) as error:
            raise PagesLostError(f"pages of the journal cannot be attended: {error}") from error

    # --- who attends

    def _choose(self, local: LocalPages) -> list[KvSource]:
        local.first_page = self.memory.released
        n_groups = self.group_released
        return [HeldGroups(n_groups, self._workers), local] if n_groups else [local]

    def _placed(self, placed: h.Placed) -> None:
        self._workers.take(placed)

    def _erred(self, worker: int, epoch: int, cause: str, detail: str, quarantine: bool) -> None:
        self.channel.erred(worker, epoch, cause, detail, quarantine=quarantine)

    def close(self) -> None:
        """Unmap everything, before the engine is closed, and leave the bus."""
        self._files.close()
        self.channel.leave()
        self._workers.leave()
