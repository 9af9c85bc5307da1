"""The broker's and the mac's ends of held pages, blocking, and pages in a file as the journal would have them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from common.attention.partial import PartialAttention
from common.engine.kv_source import PageQuery, QueryRows
from common.engine.mapped_pages import MappedPages
from common.engine.page_graph import PageShape
from common.engine.page_kernel import PageKernel
from common.ggml.backend import Backend, choose_device
from common.state.pages import PageLayout
from common.wire import held as h
from common.wire.routes import ATTENTION, PAGES
from services.runtime.bus import BlockingAsker
from services.runtime.endpoints import route_endpoint
from tests.device.page_end import Pages

WAIT_S = 30.0
ALIGNMENT = 4096


class JournalFile:
    """Every page of `pages` in one file."""

    def __init__(self, path: Path, pages: Pages) -> None:
        self.pages, self.path = pages, path
        self.places: dict[tuple[int, int], h.PagePlace] = {}
        with path.open("wb") as file:
            for page, layer in itertools.product(range(pages.n_pages), pages.layers):
                image, offset = pages.image(layer, page), -(-file.tell() // ALIGNMENT) * ALIGNMENT
                file.seek(offset)
                file.write(image)
                digest = xxhash.xxh3_64_intdigest(image)
                self.places[layer, page] = h.PagePlace(layer, page, str(path), offset, digest)

    @property
    def form(self) -> h.PageForm:
        p = self.pages
        return h.PageForm(
            p.layers, p.n_head_kv, p.n_group, p.head_dim, p.page_tokens, p.group_pages, "a model"
        )

    def query(self, layer: int, groups: range, n_tokens: int, epoch: int, ticket: int, **changes) -> h.Attend:
        p = self.pages
        fields = dict(
            epoch=epoch, ticket=ticket, layer=layer, n_tokens=n_tokens, group_first=groups.start,
            group_end=groups.stop, per_group=True, scale=p.scale, n_head_kv=p.n_head_kv,
            n_rows=p.n_group * n_tokens, head_dim=p.head_dim,
        )  # fmt: skip
        return h.Attend(**(fields | changes))

    def attended_here(self, layer: int, groups: range, n_tokens: int) -> list[PartialAttention]:
        """What the host would compute from the file itself."""
        p = self.pages
        backend = Backend(choose_device("cpu"))
        layout = PageLayout(p.page_tokens, p.n_pages * p.page_tokens, p.n_head_kv, p.head_dim)
        kernel = PageKernel(backend, PageShape(p.n_head_kv, p.head_dim, p.page_tokens))
        mapped = MappedPages(backend, kernel, layout, p.group_pages, lambda *key: self.places[key])
        try:
            rows = QueryRows(p.n_pages * p.page_tokens, n_tokens, p.n_group)
            return list(mapped.attend(PageQuery(layer, p.queries(n_tokens), p.scale, rows), groups))
        finally:
            mapped.close()
            kernel.close()
            backend.close()


class BrokerEnd:
    """What the broker says to the bridge, and hears."""

    def __init__(self, run_dir: Path) -> None:
        self.asker = BlockingAsker(PAGES, route_endpoint(run_dir, PAGES), name="broker")
        self.epoch, self._tickets = 0, itertools.count(1)

    def watch(self) -> h.PagesUp:
        """Be known, and wait for a worker."""
        self.asker.send(h.WatchPages(), wait_s=WAIT_S)
        return self.told(h.PagesUp)

    def told(self, kind, timeout_s: float = WAIT_S):
        until = time.monotonic() + timeout_s
        while (received := self.asker.recv(max(0.0, until - time.monotonic()))) is not None:
            if isinstance(received.message, kind):
                return received.message
        raise AssertionError(f"no {kind} came in {timeout_s} s")

    def ask(self, kind, **fields):
        """Send; the answer is `told` later."""
        ticket = next(self._tickets)
        self.asker.send(kind(ticket=ticket, **fields), wait_s=WAIT_S)
        return ticket

    def hold(self, journal: JournalFile, bytes_wanted: int = 1 << 30, session: int = 0) -> h.PagesGranted:
        self.ask(h.HoldPages, conversation=1, form=journal.form, bytes_wanted=bytes_wanted, session=session)
        granted = self.told(h.PagesGranted | h.PushFailed)
        assert isinstance(granted, h.PagesGranted), granted
        self.epoch = granted.epoch
        return granted

    def push(self, place: h.PagePlace):
        """One page; its answer."""
        ticket = self.ask(h.PushPage, epoch=self.epoch, conversation=1, place=place)
        answer = self.told(h.PagePushed | h.PushFailed)
        assert answer.ticket == ticket
        return answer

    def push_all(self, journal: JournalFile, first_page: int = 0) -> None:
        for (_, page), place in journal.places.items():
            if page >= first_page:
                answer = self.push(place)
                assert isinstance(answer, h.PagePushed), answer

    def cut(self, n_keys: int) -> h.PagesCut:
        self.ask(h.CutPages, epoch=self.epoch, n_keys=n_keys)
        return self.told(h.PagesCut)

    def close(self) -> None:
        self.asker.close()


class AttentionEnd:
    """What the mac process asks of the worker's pages."""

    def __init__(self, run_dir: Path, name: str = "mac") -> None:
        self.asker = BlockingAsker(ATTENTION, route_endpoint(run_dir, ATTENTION), name=name)
        self._tickets = itertools.count(1)

    def send(
        self, journal: JournalFile, epoch: int, layer: int, groups: range, n_tokens: int = 1, **changes
    ) -> int:
        ticket = next(self._tickets)
        q = changes.pop("q", journal.pages.queries(n_tokens))
        query = journal.query(layer, groups, n_tokens, epoch, ticket, **changes)
        self.asker.send(query, q, wait_s=WAIT_S)
        return ticket

    def heard(self, hot_s: float = 0.0):
        """(message, parts) of the next answer; parts are empty for a failure."""
        received = self.asker.recv(WAIT_S, hot_s=hot_s)
        assert received is not None, f"no answer came in {WAIT_S} s"
        message = received.message
        if isinstance(message, h.AttendFailed):
            return message, []
        rows = (message.n_parts, message.n_head_kv, message.n_rows)
        m, l, o = (np.frombuffer(frame, np.float32) for frame in received.frames)  # noqa: E741
        parts = zip(m.reshape(rows), l.reshape(rows), o.reshape(*rows, message.head_dim), strict=True)
        return message, [PartialAttention(*part) for part in parts]

    def ask(self, *arguments, **changes):
        self.send(*arguments, **changes)
        return self.heard()

    def close(self) -> None:
        self.asker.close()


@contextmanager
def page_ends(run_dir: Path) -> Iterator[tuple[BrokerEnd, AttentionEnd]]:
    """Both ends, closed at the end."""
    ends = BrokerEnd(run_dir), AttentionEnd(run_dir)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()
