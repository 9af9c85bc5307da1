"""SequenceState: the K/V rows and recurrent states of one sequence, of all layers an engine holds.

Each layer counts the positions it has rows for; rows beyond that count are never read. K and V are f16, token-major,
one tensor each of [n_ctx][n_head_kv * head_dim]; with pages, layers that attend to everything keep them page by page
(pages.py). A recurrent layer has a convolution tail and a state matrix per head, both f32. Rows and states leave and
enter as RowSection, token-major, checked whole before the first byte is changed.
Knows nothing of graphs; used by common/engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import EngineError
from common.ggml.tensor import F16, F32, Arena, Tensor
from common.model.spec import ModelSpec
from common.wire.rows import KIND_CONV, KIND_K, KIND_NAMES, KIND_RECURRENT, KIND_V, RowSection

from .pages import PageLayout
from .recurrent import RecurrentSnapshot
from .rows import PagedKeys, PagedValues, RowStore, TokenRows


@dataclass
class LayerState:
    """One layer's tensors by section kind (K and V, or conv and recurrent), and the positions it has seen."""

    tensors: dict[int, Tensor]
    stores: dict[int, RowStore]
    """How K and V lie in their tensors; empty in a recurrent layer."""
    n_valid: int = 0
    n_clean: int = 0
    """Rows [n_valid, n_clean) are known to be zero."""

    @property
    def is_recurrent(self) -> bool:
        """True when the state cannot be cut."""
        return KIND_RECURRENT in self.tensors


class SequenceState:
    """State of the layers [first, last) of `spec`, with room for `n_ctx` positions."""

    def __init__(
        self,
        spec: ModelSpec,
        n_ctx: int,
        buffer_type: int,
        page_tokens: int | None = None,
        resident_tokens: int | None = None,
    ) -> None:
        """page_tokens: keys of a page, a multiple of PAGE_PAD_TOKENS; None when attention reads no pages.

        resident_tokens: positions whose pages are in memory at once; None: all. Memory for so many must be free now.
        Memory of rows is not touched before the rows come.
        """
        self.spec, self.n_ctx = spec, n_ctx
        self.pages = PageLayout(page_tokens, n_ctx, spec.n_head_kv, spec.head_dim) if page_tokens else None
        n_paged = sum(self._has_pages(layer) for layer in spec.layers)
        self._arena, self._paged_arena = Arena(2 * len(spec.layers)), Arena(2 * n_paged)
        self.layers: dict[int, LayerState] = {layer: self._declare(layer) for layer in spec.layers}
        self.released = 0
        """Positions [0, released) of the layers with pages are in memory no more."""
        self.n_bytes = 0
        if n_paged < len(spec.layers):
            self.n_bytes += self._arena.allocate(buffer_type, clear=True)
        if n_paged:
            share = 1.0 if resident_tokens is None else min(1.0, resident_tokens / n_ctx)
            self.n_bytes += self._paged_arena.allocate(buffer_type, share=share)

    def _has_pages(self, layer: int) -> bool:
        return self.pages is not None and self.spec.kind(layer) == "attention"

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """The layers that keep their rows page by page."""
        return tuple(layer for layer in self.spec.layers if self._has_pages(layer))

    def _declare(self, layer: int) -> LayerState:
        spec = self.spec
        tensor = self._paged_arena.tensor if self._has_pages(layer) else self._arena.tensor
        if spec.kind(layer) == "recurrent":
            r = spec.recurrent
            assert r is not None, "the spec checks that recurrent layers have sizes"
            conv = tensor(F32, r.d_conv - 1, r.n_channels, name=f"conv {layer}")
            state = tensor(F32, r.d_state, r.d_state, r.n_head_v, name=f"state {layer}")
            return LayerState({KIND_CONV: conv, KIND_RECURRENT: state}, {})
        # a sliding layer keeps all its rows too: any of them can be truncated to
        stores: dict[int, RowStore]
        if self.pages and self._has_pages(layer):
            k = tensor(F16, spec.head_dim, spec.n_head_kv * self.n_ctx, name=f"K {layer}")
            v = tensor(F16, 1, self.pages.n_value_elements, name=f"V {layer}")
            stores = {KIND_K: PagedKeys(k, self.pages), KIND_V: PagedValues(v, self.pages)}
        else:
            k = tensor(F16, spec.n_embd_kv, self.n_ctx, name=f"K {layer}")
            v = tensor(F16, spec.n_embd_kv, self.n_ctx, name=f"V {layer}")
            stores = {KIND_K: TokenRows(k), KIND_V: TokenRows(v)}
        return LayerState({KIND_K: k, KIND_V: v}, stores)

    # --- counting

    def n_valid(self, layers: range) -> int:
        """Positions for which every one of the layers has rows."""
        return min(self.layers[layer].n_valid for layer in layers)

    def require_at(self, layers: range, position: int) -> None:
        """EngineError unless every one of the layers has seen exactly `position` positions."""
        for layer in layers:
            if self.layers[layer].n_valid != position:
                raise EngineError(
                    f"layer {layer} has rows for {self.layers[layer].n_valid} positions, not {position}; "
                    "truncate, restore or import rows first"
                )

    def advance(self, layers: range, n_valid: int) -> None:
        """Notes that the layers now have rows for [0, n_valid)."""
        for layer in layers:
            self._count(layer, n_valid)

    def _count(self, layer: int, n: int) -> None:
        held = self.layers[layer]
        if n < held.n_valid:
            held.n_clean = 0
        held.n_valid = n

    def truncate(self, layers: range, n: int) -> None:
        """Forgets positions from `n` on. Recurrent layers can only go to 0 or stay. Raises EngineError."""
        if n < 0:
            raise EngineError(f"cannot truncate to {n} positions")
        self._require_in_memory(layers, n)
        for layer in layers:
            state = self.layers[layer]
            if n > state.n_valid or (state.is_recurrent and n not in (0, state.n_valid)):
                raise EngineError(
                    f"layer {layer} ({self.spec.kind(layer)}) has seen {state.n_valid} positions and cannot go to {n}"
                    + ("; restore a snapshot" if state.is_recurrent else "")
                )
        for layer in layers:
            self._reset(layer, n)
        if n == 0 and all(self.layers[layer].n_valid == 0 for layer in self.paged_layers):
            self.released = 0

    def _require_in_memory(self, layers: range, n: int) -> None:
        """EngineError where going back to `n` would need pages that are released."""
        if 0 < n < self.released and any(self._has_pages(layer) for layer in layers):
            raise EngineError(
                f"cannot go back to {n}: pages before {self.released} are released; recall them first"
            )

    def clean(self, layers: range, end: int) -> None:
        """Zeroes the K/V rows from each layer's n_valid to `end` that are not known to be zero.

        Attention reads some rows beyond the newest, hidden by a mask. What was left there must be finite: in a product
        with nothing, anything else comes through.
        """
        for layer in layers:
            held = self.layers[layer]
            if held.n_clean < end and held.n_valid < end:
                for store in held.stores.values():
                    store.write(held.n_valid, np.zeros((end - held.n_valid) * store.row_bytes, np.uint8))
                held.n_clean = end

    def _reset(self, layer: int, n: int) -> None:
        state = self.layers[layer]
        if n == 0 and state.is_recurrent:
            for tensor in state.tensors.values():
                tensor.write(np.zeros(tensor.n_bytes, np.uint8))
        self._count(layer, n)

    def lose(self, layers: range, position: int) -> None:
        """After a failed run: rows from `position` on are void, and recurrent states are void altogether."""
        for layer in layers:
            held = self.layers[layer]
            held.n_clean = 0
            self._reset(layer, 0 if held.is_recurrent else min(position, held.n_valid))

    # --- snapshots

    def snapshot(self, layers: range) -> RecurrentSnapshot:
        """Copies the recurrent state of the layers, which must all have seen the same positions."""
        n = self.n_valid(layers)
        self.require_at(layers, n)
        conv, state = {}, {}
        for layer in layers:
            if self.layers[layer].is_recurrent:
                tensors = self.layers[layer].tensors
                conv[layer] = _read(tensors[KIND_CONV])
                state[layer] = _read(tensors[KIND_RECURRENT])
        return RecurrentSnapshot(layers.start, layers.stop, n, conv, state)

    def restore(self, layers: range, snapshot: RecurrentSnapshot) -> None:
        """Goes back to a snapshot of the same layers: their K/V rows must still reach that far. Raises EngineError."""
        if (snapshot.first, snapshot.last) != (layers.start, layers.stop):
            raise EngineError(
                f"the snapshot is of layers [{snapshot.first}, {snapshot.last}), not [{layers.start}, {layers.stop})"
            )
        for layer in layers:
            state = self.layers[layer]
            if not state.is_recurrent and state.n_valid < snapshot.n_valid:
                raise EngineError(
                    f"layer {layer} has rows for {state.n_valid} positions, the snapshot needs {snapshot.n_valid}"
                )
        self._require_in_memory(layers, snapshot.n_valid)
        for layer, conv in snapshot.conv.items():
            self.layers[layer].tensors[KIND_CONV].write(conv)
            self.layers[layer].tensors[KIND_RECURRENT].write(snapshot.state[layer])
        self.advance(layers, snapshot.n_valid)

    # --- rows out and in

    def export_rows(self, layers: range, p0: int, p1: int, *, kv: bool, state: bool) -> list[RowSection]:
        """Copies of the K/V rows of positions [p0, p1), and of the recurrent states as they are. Raises EngineError."""
        if not 0 <= p0 <= p1:
            raise EngineError(f"rows [{p0}, {p1}) is not a range of positions")
        sections = []
        for layer in layers:
            held = self.layers[layer]
            if held.is_recurrent:
                sections += [self._export_state(layer, kind) for kind in (KIND_CONV, KIND_RECURRENT) if state]
            elif kv and p1 > p0:
                if p1 > held.n_valid:
                    raise EngineError(
                        f"layer {layer} has rows for {held.n_valid} positions, asked for [{p0}, {p1})"
                    )
                if self._has_pages(layer) and p0 < self.released:
                    raise EngineError(
                        f"rows [{p0}, {p1}): those before {self.released} are released; recall them"
                    )
                sections += [self._export_kv(layer, kind, p0, p1) for kind in (KIND_K, KIND_V)]
        return sections

    def _export_kv(self, layer: int, kind: int, p0: int, p1: int) -> RowSection:
        store = self.layers[layer].stores[kind]
        return RowSection(layer, kind, store.tensor.type, p0, p1, store.row_bytes, store.read(p0, p1))

    def _export_state(self, layer: int, kind: int) -> RowSection:
        held = self.layers[layer]
        tensor = held.tensors[kind]
        data = tensor.read(np.empty(tensor.n_bytes, np.uint8))
        return RowSection(layer, kind, tensor.type, held.n_valid, held.n_valid, tensor.n_bytes, data)

    def import_rows(self, layers: range, sections: list[RowSection], n_valid_after: int) -> None:
        """Writes rows and states of the layers; afterwards each has seen `n_valid_after` positions. All or nothing.

        K/V sections must join what a layer has (no gap) and reach `n_valid_after`; a recurrent layer needs both its
        states, of that position, unless it is there already. Raises EngineError before anything is changed.
        """
        if not 0 <= n_valid_after <= self.n_ctx:
            raise EngineError(f"n_valid_after is {n_valid_after}; the context holds {self.n_ctx}")
        covered: dict[tuple[int, int], int] = {}
        for section in sections:
            self._check_section(layers, section, n_valid_after, covered)
        for layer in layers:
            held = self.layers[layer]
            for kind in held.tensors:
                reaches = covered.get((layer, kind), held.n_valid)
                if reaches < n_valid_after or (held.is_recurrent and reaches != n_valid_after):
                    raise EngineError(
                        f"layer {layer}: {KIND_NAMES[kind]} would reach {reaches} positions, not {n_valid_after}"
                    )
        for section in sections:
            held = self.layers[section.layer]
            if section.kind > KIND_V:
                held.tensors[section.kind].write(_bytes(section))
            elif section.p1 > section.p0:
                held.stores[section.kind].write(section.p0, _bytes(section))
        self.advance(layers, n_valid_after)

    def _check_section(
        self, layers: range, section: RowSection, n_valid_after: int, covered: dict[tuple[int, int], int]
    ) -> None:
        key = (section.layer, section.kind)
        if section.layer not in layers or section.kind not in self.layers[section.layer].tensors:
            raise EngineError(
                f"rows of {section} do not belong to layers [{layers.start}, {layers.stop}) here"
            )
        held = self.layers[section.layer]
        tensor = held.tensors[section.kind]
        state = section.kind > KIND_V
        row = tensor.n_bytes if state else held.stores[section.kind].row_bytes
        rows = 1 if state else section.p1 - section.p0
        if section.ggml_type != tensor.type or section.row_bytes != row:
            raise EngineError(f"rows of {section}: here a row is {row} bytes of type {tensor.type}")
        if _bytes(section).nbytes != rows * row:
            raise EngineError(
                f"rows of {section}: {_bytes(section).nbytes} bytes came, {rows * row} are needed"
            )
        if state:
            if section.p0 != section.p1 or section.p1 != n_valid_after or key in covered:
                raise EngineError(f"state of {section} is not the one state at position {n_valid_after}")
            if not np.isfinite(_bytes(section).view(np.float32)).all():
                raise EngineError(f"state of {section} has values that are not finite")
        elif (
            not 0 <= section.p0 <= min(section.p1, covered.get(key, held.n_valid))
            or section.p1 > n_valid_after
        ):
            raise EngineError(f"rows of {section} do not join [0, {covered.get(key, held.n_valid)})")
        covered[key] = section.p1

    def close(self) -> None:
        """Frees the memory. Calling it again does nothing."""
        self._arena.close()
        self._paged_arena.close()


def _read(tensor: Tensor) -> np.ndarray:
    """f32 copy of a state tensor, outermost axis first."""
    shape = [n for n in reversed(tensor.ne)]
    while len(shape) > 2 and shape[0] == 1:
        shape.pop(0)
    return tensor.read(np.empty(shape, np.float32))


def _bytes(section: RowSection) -> np.ndarray:
    """u8 view of a section's data, whatever buffer it came in."""
    return np.frombuffer(section.data, np.uint8)
