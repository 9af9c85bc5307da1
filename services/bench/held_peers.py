"""A broker and workers in this process, for checks of held pages that no other process may disturb.

They speak the messages of routes "hold" and "attention" as the real ones do: pages go to a file, groups are asked back
by the host's limit, workers attend on kernels of their own, from that file. What goes wrong is said by `fault`.
Used by verify_held.py and tests.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from common.attention.partial import fold_all
from common.engine.kv_source import PageQuery, QueryRows
from common.engine.mapped_pages import MappedPages
from common.engine.page_graph import PageShape
from common.engine.page_kernel import PageKernel
from common.errors import LinkDownError, ServiceError
from common.ggml.backend import Backend, choose_device
from common.state.pages import PageLayout
from common.wire import held as h
from common.wire.message import Message
from services.runtime.conversation import Received

Fault = Literal["", "cut", "frozen", "wrong", "not finite", "shape", "stale", "failed"]
FAULTS: tuple[Fault, ...] = ("cut", "frozen", "wrong", "not finite", "shape", "stale", "failed")
"""Connection lost, no answer, other numbers, not numbers, another shape, another life, an error for an answer."""


class PeerBroker:
    """The asking end of route "hold", with the broker behind it. `up` False: it cannot be reached."""

    def __init__(self, file: Path, host_tokens: int, workers: list[PeerWorker]) -> None:
        self.up, self.takes = True, True
        self.n_pages = 0
        self._file, self._host_tokens, self._workers = file, host_tokens, workers
        self._end, self._n_losses, self._conversation = 0, 0, 0
        self._holds: h.HostHolds | None = None
        self._told: deque[Message] = deque()
        self._pages: dict[tuple[int, int], h.PagePlace] = {}
        self._known: dict[tuple[int, int, int], h.PagePlace] = {}
        """By layer, page and hash of all token ids up to its end."""
        self._states: dict[int, tuple[int, int, int, int]] = {}
        """By hash of the token ids before it: position, offset, bytes, their hash."""
        self._chain: list[int] = []
        self.form: h.PageForm | None = None

    def place(self, layer: int, page: int) -> h.PagePlace:
        """Where a page of the conversation lies. Raises KeyError."""
        return self._pages[layer, page]

    def tell(self, message: Message) -> None:
        """Something that the host hears next."""
        self._told.append(message)

    def restart(self) -> None:
        """Forget all conversations, not the journal."""
        self._n_losses += 1
        self._told.clear()
        self._conversation += 1000

    def send(self, message: Message, *arrays: object, wait_s: float = 0.0) -> None:
        """See Asks."""
        if not self.up:
            raise ServiceError("no broker")
        views = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        match message:
            case h.OpenConversation():
                self._open(message, views[0].view(np.int32))
            case h.KeepPage():
                self._keep(message, *views)
            case h.KeepState():
                offset = self._write(views[0])
                self._states[_hash(views[1])] = (message.position, offset, len(views[0]), _hash(views[0]))
            case h.CutConversation():
                self._cut(message.n_tokens)
            case h.HostHolds():
                self._holds = message
                self._plan(message)
            case h.WorkerErred():
                self._workers[message.worker].down()
            case _:
                pass

    def recv(self, timeout_s: float | None, *, hot_s: float = 0.0) -> Received | None:
        """See Asks."""
        return Received(self._told.popleft(), (), b"", 1, 1) if self._told and self.up else None

    def losses(self) -> int:
        """See Asks."""
        return self._n_losses

    def close(self) -> None:
        """See Asks."""

    def place_again(self) -> None:
        """Workers that failed are there again, with all that the journal has of this conversation."""
        for worker in self._workers:
            worker.up(self._pages)
        self._share_out()

    def _open(self, message: h.OpenConversation, ids: np.ndarray) -> None:
        self._conversation += 1
        self._cut(0)
        self.form, pt = message.form, message.form.page_tokens
        places: list[h.PagePlace] = []
        state = (0, 0, 0, 0)
        for page in range(len(ids) // pt):
            self._link(ids[page * pt : (page + 1) * pt])
            found = [self._known.get((layer, page, self._chain[-1])) for layer in message.form.layers]
            if not all(place and self._is_whole(place) for place in found) or len(places) != page * len(
                found
            ):
                continue
            places += [place for place in found if place]
            state = self._states.get(_hash(ids[: (page + 1) * pt]), state)
        self._chain = self._chain[: len(places) // len(message.form.layers)]
        self._pages = {(place.layer, place.page): place for place in places}
        opened = h.ConversationOpened(message.ticket, self._conversation, len(ids), tuple(places))
        if state[0]:
            opened = h.ConversationOpened(
                message.ticket,
                self._conversation,
                len(ids),
                tuple(places),
                state[0],
                str(self._file),
                *state[1:],
            )
        self._told += [opened, h.Room(1 << 30)]
        self._share_out()

    def _keep(self, message: h.KeepPage, keys: np.ndarray, values: np.ndarray, ids: np.ndarray) -> None:
        if message.conversation != self._conversation or not self.takes:
            cause = "journal_full" if message.conversation == self._conversation else "unknown_conversation"
            self._told.append(h.HoldFailed(message.ticket, 700, cause, f"{cause}, said the check"))
            return
        image = np.concatenate((keys, values))
        place = h.PagePlace(message.layer, message.page, str(self._file), self._write(image), _hash(image))
        self._pages[message.layer, message.page] = place
        self.n_pages += 1
        if message.page == len(self._chain):
            self._link(ids)
        self._known[message.layer, message.page, self._chain[message.page]] = place
        self._told.append(h.PageKept(message.ticket, message.conversation, place))
        self._share_out()
        form = self.form
        if (
            self._holds
            and form
            and message.layer == form.layers[-1]
            and not (message.page + 1) % form.group_pages
        ):
            self._plan(self._holds)  # one group more may go

    def _is_whole(self, place: h.PagePlace) -> bool:
        assert self.form is not None
        try:
            image = np.fromfile(place.path, np.uint8, self.form.image_bytes, offset=place.offset)
        except OSError:
            return False
        return _hash(image) == place.xxh3

    def _link(self, ids: np.ndarray) -> None:
        """One more page of token ids: it is known by these and all before."""
        before = np.array(self._chain[-1:], np.uint64).view(np.uint8)
        self._chain.append(_hash(np.concatenate((before, np.ascontiguousarray(ids).view(np.uint8)))))

    def _write(self, data: np.ndarray) -> int:
        offset = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.seek(offset)
            file.write(data)
        self._end = offset + data.nbytes
        return offset

    def _cut(self, n_tokens: int) -> None:
        page = n_tokens // self.form.page_tokens if self.form else 0
        self._pages = {key: place for key, place in self._pages.items() if key[1] < page}
        self._chain = self._chain[:page]
        for worker in self._workers:
            worker.forget(page)

    def _plan(self, holds: h.HostHolds) -> None:
        assert self.form is not None
        group = self.form.group_tokens
        end = min(-(-(holds.n_tokens + group - self._host_tokens) // group), (holds.n_tokens - 1) // group)
        if end > holds.group_first and holds.conversation == self._conversation:
            self._told.append(h.ReleaseGroups(1, self._conversation, end))

    def _share_out(self) -> None:
        """The oldest groups to the first worker, as many as it takes, the next to the next."""
        if self.form is None:
            return
        n_pages = 0
        while all((layer, n_pages) in self._pages for layer in self.form.layers):
            n_pages += 1
        first, n_groups = 0, n_pages // self.form.group_pages
        for number, worker in enumerate(self._workers):
            end = min(n_groups, first + worker.n_groups_max)
            if worker.take(self.form, self._pages, range(first, end)):
                self._told.append(h.Placed(self._conversation, number, worker.epoch, first, max(first, end)))
            first = end


class PeerWorker:
    """The asking end of route "attention", with bridge and worker behind it. `fault`: what its next answer suffers."""

    def __init__(self, n_groups_max: int = 1 << 20) -> None:
        self.n_groups_max, self.epoch = n_groups_max, 1
        self.fault: Fault = ""
        self.n_answers = 0
        self._is_up, self._n_losses = True, 0
        self._groups, self._first, self._group_pages = range(0), 0, 1
        self._backend = Backend(choose_device("cpu"))
        self._kernel: PageKernel | None = None
        self._pages: MappedPages | None = None
        self._places: dict[tuple[int, int], h.PagePlace] = {}
        self._told: deque[tuple[h.Attend, np.ndarray]] = deque()

    def take(self, form: h.PageForm, places: dict[tuple[int, int], h.PagePlace], groups: range) -> bool:
        """Holds these groups now; False: nothing new."""
        self._places = places
        if self._kernel is None:
            self._group_pages = form.group_pages
            layout = PageLayout(form.page_tokens, form.group_tokens, form.n_head_kv, form.head_dim)
            shape = PageShape(form.n_head_kv, form.head_dim, form.page_tokens)
            self._kernel = PageKernel(self._backend, shape, form.many_rows)
            at = lambda layer, page: self._places[layer, page]  # noqa: E731
            self._pages = MappedPages(self._backend, self._kernel, layout, form.group_pages, at)
        if not self._is_up or groups == self._groups:
            return False
        self._groups, self._first = groups, groups.start
        return True

    def forget(self, page: int) -> None:
        """Pages from there on are void."""
        if self._pages is not None:
            self._pages.forget(page)
            end = page // self._group_pages
            self._groups = range(self._groups.start, max(self._groups.start, min(self._groups.stop, end)))

    def down(self) -> None:
        """Not to be used before `up`."""
        self._is_up, self._groups = False, range(-1, -1)

    def up(self, places: dict[tuple[int, int], h.PagePlace]) -> None:
        """There again, in another life."""
        self._is_up, self.epoch, self._places = True, self.epoch + 1, places

    def send(self, message: Message, *arrays: object, wait_s: float = 0.0) -> None:
        """See Asks."""
        assert isinstance(message, h.Attend)
        if self.fault == "cut":
            self.fault = ""
            self._n_losses += 1
            raise LinkDownError("cut, said the check")
        self._told.append((message, np.array(arrays[0])))

    def recv(self, timeout_s: float | None, *, hot_s: float = 0.0) -> Received | None:
        """See Asks."""
        if not self._told:
            time.sleep(min(timeout_s or 0.0, 0.01))
            return None
        message, q = self._told.popleft()
        fault, self.fault = self.fault, ""
        if fault == "frozen":
            return None
        if fault == "failed":
            failed = h.AttendFailed(message.epoch, message.ticket, 401, "memory", "said the check")
            return Received(failed, (), b"", 1, 1)
        groups = range(self._first + message.group_first, self._first + message.group_end)
        if groups.stop > self._groups.stop:  # asked before it was told that a broker started anew knows fewer
            failed = h.AttendFailed(message.epoch, message.ticket, 410, "order", "not held, said the check")
            return Received(failed, (), b"", 1, 1)
        assert self._pages is not None
        keys_end = message.group_end * 1_000_000
        rows = QueryRows(keys_end, message.n_tokens, message.n_rows // message.n_tokens)
        parts = list(self._pages.attend(PageQuery(message.layer, q, message.scale, rows), groups))
        parts = parts if message.per_group else [fold_all(parts)]
        m, l, o = (np.stack([getattr(part, name) for part in parts]) for name in "mlo")  # noqa: E741
        if fault == "wrong":
            o[-1, 0, 0, 0] += 1.0
        elif fault == "not finite":
            o[0, 0, 0, 0] = np.nan
        self.n_answers += 1
        n_head = message.n_head_kv + (fault == "shape")
        epoch = message.epoch + (fault == "stale")
        told = h.Attended(
            epoch,
            message.ticket,
            len(parts),
            0,
            0,
            n_head,
            message.n_rows,
            message.head_dim,
            1.0,
            0.0,
            1.0,
            0.0,
            1.0,
        )
        return Received(told, tuple(memoryview(a).cast("B") for a in (m, l, o)), b"", 1, 1)

    def losses(self) -> int:
        """See Asks."""
        return self._n_losses

    def close(self) -> None:
        """See Asks."""

    def end(self) -> None:
        """Free what it attends with."""
        if self._pages is not None:
            self._pages.close()
        if self._kernel is not None:
            self._kernel.close()
        self._backend.close()


def _hash(data: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(data).view(np.uint8))
