"""FrozenSource: a KvSource in front of a sequence's own pages, which answers old groups from frozen pages.

    source = FrozenSource(sequence, FrozenOptions("interpreter", folder, ...))
    ...                        # the sequence decodes; old groups become programs and then serve their keys
    source.truncate(n)         # before sequence rows are forgotten
    source.close()

Rows are taken from the sequence, whose pages go on holding them: a program that fails costs nothing but its own time.
Used by `outrigger verify --frozen` and by whoever runs whole models beside a Neural Engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.attention.partial import PartialAttention
from common.engine.engine import Engine
from common.engine.kv_source import KvSource, PageQuery
from common.engine.local_pages import LocalPages
from common.engine.sequence import EngineSequence
from common.errors import EngineError
from device.coreml.frozen import plan
from device.coreml.frozen.builder import Rows
from device.coreml.frozen.runtime import PageRuntime
from device.frozen_groups import FrozenAnswer, FrozenGroups, FrozenMode, FrozenShape, open_frozen


@dataclass(frozen=True)
class FrozenOptions:
    """What runs programs, where their files lie, the bytes they may take, and the shares of keys by query size."""

    mode: FrozenMode
    folder: Path
    budget_bytes: int
    shares: tuple[tuple[int, float], ...] = plan.SHARES
    runtime: PageRuntime | None = None
    """In the place of the mode's own."""


class FrozenSource:
    """Attends for a sequence of an engine that decodes by pages."""

    def __init__(self, engine: Engine, sequence: EngineSequence, options: FrozenOptions) -> None:
        """Raises EngineError when the engine has no pages, and as open_frozen."""
        decoding, spec = engine.decoding, sequence.spec
        self._sequence, self._group_pages = sequence, decoding.group_pages
        self.layers = tuple(n for n in spec.layers if spec.kind(n) == "attention")
        group_tokens = decoding.page_tokens * decoding.group_pages
        n_rows = spec.n_head // spec.n_head_kv
        shape = FrozenShape(self.layers, spec.n_head_kv, spec.head_dim, n_rows, group_tokens)
        groups = open_frozen(
            options.mode, shape, self.rows, options.folder, options.budget_bytes, options.shares,
            options.runtime,
        )  # fmt: skip
        if groups is None:
            raise EngineError("frozen pages are off: make no source for them")
        self.groups: FrozenGroups = groups
        self.keys = 0
        """Keys that frozen pages answered for, over all layers and queries."""
        self._asked: tuple[PageQuery, FrozenAnswer] | None = None
        sequence.set_sources(self._choose)

    def start_attend(self, query: PageQuery) -> None:
        """As KvSource; programs begin at once, in their own thread."""
        position, group_tokens = query.rows.position, self.groups.shape.group_tokens
        self.groups.held(query.layer, position)
        groups = range(position // group_tokens)
        asked = self.groups.ask(query.layer, query.q, query.scale, query.rows.n_tokens, groups)
        self._asked = query, asked

    def wait_attend(self) -> list[PartialAttention]:
        """As KvSource: every group of the sequence, the oldest first; ordinary kernels attend while programs run."""
        assert self._asked is not None, "nothing was asked"
        query, asked = self._asked
        self._asked = None
        end = -(-query.rows.end // self.groups.shape.group_tokens)
        parts = asked.complete(range(end), lambda run: self._attend_here(query, run))
        self.keys += asked.keys
        return parts

    def build(self, n_keys: int) -> None:
        """Builds what is worth having of the first n_keys keys, now and in this thread; see also groups.start."""
        for layer in self.layers:
            self.groups.held(layer, n_keys)
        self.groups.build_all()

    def truncate(self, n_keys: int) -> None:
        """The sequence is about to forget the rows from n_keys on."""
        self.groups.truncate(n_keys)

    def close(self) -> None:
        """The sequence attends for itself again; programs and files go."""
        self._sequence.set_sources(None)
        self.groups.close()

    def _choose(self, local: LocalPages) -> Sequence[KvSource]:
        self._local = local
        return [self]

    def _attend_here(self, query: PageQuery, groups: range) -> list[PartialAttention]:
        """The partials of some groups by ordinary kernels."""
        n = self._group_pages
        return self._local.attend_pages(query, groups.start * n, groups.stop * n)

    def rows(self, layer: int, first: int, n: int) -> Rows:
        """Stored rows of a layer, for programs; see RowsOf."""
        span = self._sequence.span(layer, layer + 1)
        k, v = span.export_rows(first, first + n, state=False)
        k_rows, v_rows = (np.frombuffer(rows.data, np.uint8).reshape(n, rows.row_bytes) for rows in (k, v))
        return k_rows, v_rows, k.ggml_type
