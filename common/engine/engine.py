"""Engine: one model file made ready on one device. Loads, hands out LayerSpans, closes.

For one thread at a time; computing releases the interpreter lock. Used by services/mac, device/worker and the benches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.errors import EngineError, UnsupportedOperationError
from common.ggml.backend import Backend, devices_for
from common.ggml.ffi import WHEEL_VERSION, lib
from common.limits import GROUP_PAGES, KV_PAD_TOKENS, N_CTX_MAX, PAGE_TOKENS, UBATCH_TOKENS
from common.model.gguf import GgufFile
from common.model.layout import matrices
from common.model.spec import ModelSpec
from common.state.sequence import SequenceState

from .graphs import GraphCache
from .inputs import Inputs
from .kv_source import ChooseSources
from .page_inputs import PageInputs
from .page_kernel import Form
from .paged import OnAttended, PagedGraphs
from .sequence import EngineSequence
from .span import LayerSpan
from .weights import WeightLayout, Weights

DecodePath = Literal["paged", "fused"]


@dataclass(frozen=True)
class Decoding:
    """How single tokens attend: `fused` is stock's flash attention, to the bit; `paged` goes by pages, at all depths.

    Answers of the two differ by rounding, and so do those of other page or group sizes: choose once.
    """

    path: DecodePath = "fused"
    page_tokens: int = PAGE_TOKENS
    group_pages: int = GROUP_PAGES
    many_rows_from: int | None = None
    """With `paged`: ubatches of many rows that start there or later go by pages, too; a multiple of KV_PAD_TOKENS."""
    many_rows: Form = "kernels"
    """How they do: see forms.py."""
    resident_tokens: int | None = None
    """With `paged`: positions that are in memory at once, the others being released in time; None: all."""
    stagger: bool = True
    """Ubatches that go by pages may run staggered, two at a time; the same bits."""

    def __post_init__(self) -> None:
        if self.path not in ("paged", "fused"):
            raise EngineError(f"decode is {self.path!r}; allowed are paged and fused")
        if self.group_pages < 1:
            raise EngineError(f"group_pages is {self.group_pages}; allowed are 1 and more")
        beyond = self.many_rows_from
        if beyond is not None and (self.path != "paged" or beyond < KV_PAD_TOKENS or beyond % KV_PAD_TOKENS):
            raise EngineError(
                f"many_rows_from is {beyond}; it is a multiple of {KV_PAD_TOKENS}, and decode must be paged"
            )


class Engine:
    """Made by `Engine.load`.

    `spec` says what the model is, `n_ctx` how many positions fit, `n_ubatch` how many rows run in one pass.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        weights: Weights,
        n_ctx: int,
        n_ubatch: int,
        decoding: Decoding = Decoding(),
    ) -> None:
        self.spec, self.n_ctx, self.n_ubatch, self.decoding = spec, n_ctx, n_ubatch, decoding
        self._backend, self._weights = backend, weights
        self.state = self._new_state(n_ctx)
        self._inputs = self._new_inputs(self._n_flash)
        if self.state.pages:
            self.graphs: GraphCache = self._new_paged(self._inputs, None)
        else:
            self.graphs = GraphCache(backend, weights, self.state, self._inputs)
        self._first = EngineSequence(self, self.state)
        self._sequences = [self._first]
        self.passed_over: tuple[str, ...] = ()
        """Better devices that lack an operation of this model, with what they lack."""

    @property
    def _n_flash(self) -> int:
        """Positions that a ubatch of many rows may see by flash attention."""
        beyond = self.decoding.many_rows_from
        if beyond is None:
            return self.n_ctx
        return min(self.n_ctx, beyond + -(-self.n_ubatch // KV_PAD_TOKENS) * KV_PAD_TOKENS)

    def _new_inputs(self, n_flash: int) -> Inputs:
        spec, sections = self.spec, bool(self.spec.rope.sections)
        window = spec.sliding.window if spec.sliding else None
        buffer_type = self._backend.buffer_type
        return Inputs(spec.n_embd, self.n_ctx, self.n_ubatch, sections, window, buffer_type, n_flash)

    def _new_paged(self, inputs: Inputs, lead: PagedGraphs | None) -> PagedGraphs:
        """Graphs of sequences with pages, and where ubatches run staggered a second half of them."""
        decoding, beyond = self.decoding, self.decoding.many_rows_from
        n_flash = KV_PAD_TOKENS if lead else self._n_flash
        graphs = PagedGraphs(
            self._backend,
            self._weights,
            self.state,
            inputs,
            PageInputs(self.spec, n_flash, self.n_ubatch, self._backend.buffer_type),
            decoding.group_pages,
            many_rows_from=beyond,
            many_rows=decoding.many_rows,
            lead=lead,
        )
        if lead is None and beyond is not None and beyond < self.n_ctx and decoding.stagger:
            graphs.add_second(self._new_paged(self._new_inputs(KV_PAD_TOKENS), graphs))
        return graphs

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        n_ctx: int,
        n_threads: int = 1,
        n_ubatch: int = UBATCH_TOKENS,
        weights: WeightLayout = "repack",
        device: str = "auto",
        decoding: Decoding = Decoding(),
        last: int | None = None,
    ) -> Engine:
        """Loads the layers a GGUF file holds (a whole model or a tail); of them only [0, last), and no output head,
        when `last` is given.

        n_ctx is rounded up to a multiple of KV_PAD_TOKENS. Raises ModelError for the file, EngineError for everything
        else (OutOfMemoryError when memory is short).
        """
        if not 1 <= n_ctx <= N_CTX_MAX:
            raise EngineError(f"n_ctx is {n_ctx}; allowed are 1 to {N_CTX_MAX}")
        if not 1 <= n_ubatch <= N_CTX_MAX:
            raise EngineError(f"n_ubatch is {n_ubatch}; allowed are 1 to {N_CTX_MAX}")
        n_ctx = -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS
        spec = ModelSpec.read(path)
        spec = spec if last is None else spec.head(last)
        passed_over: list[str] = []
        for candidate in devices_for(device):
            backend = Backend(candidate, n_threads)
            file, names = GgufFile(path), spec.tensors
            placed = Weights(file, backend, weights, matrices(spec), names=names, has_output=spec.has_output)
            engine = cls(spec, backend, placed, n_ctx, min(n_ubatch, n_ctx), decoding)
            engine.passed_over = tuple(passed_over)
            try:
                engine.graphs.reserve(engine.n_ubatch)
                return engine
            except UnsupportedOperationError as error:
                engine.close()
                passed_over.append(str(error))
            except BaseException:
                engine.close()
                raise
        raise EngineError(f"no device here runs {path}: {'; '.join(passed_over)}")

    def span(self, first: int, last: int) -> LayerSpan:
        """Layers [first, last) as one function. Raises EngineError when the file does not hold them."""
        return self._first.span(first, last)

    def set_sources(self, choose: ChooseSources | None) -> None:
        """Who attends for the engine's own sequence. See EngineSequence.set_sources."""
        self._first.set_sources(choose)

    def watch_attention(self, told: OnAttended) -> None:
        """Have each attention by pages told; of an engine that decodes fused there is none."""
        if isinstance(self.graphs, PagedGraphs):
            self.graphs.on_attended = told

    def sequence(self, n_ctx: int) -> EngineSequence:
        """A further sequence of up to n_ctx positions, at most the engine's; the same bits as in the engine's own.

        Raises EngineError for the size, OutOfMemoryError when memory is short.
        """
        if not 1 <= n_ctx <= self.n_ctx:
            raise EngineError(f"a sequence has 1 to {self.n_ctx} positions here, not {n_ctx}")
        n_ctx = -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS
        state = self._new_state(n_ctx)
        self._sequences.append(EngineSequence(self, state))
        return self._sequences[-1]

    def _new_state(self, n_ctx: int) -> SequenceState:
        page_tokens = self.decoding.page_tokens if self.decoding.path == "paged" else None
        resident = self.decoding.resident_tokens if page_tokens else None
        return SequenceState(self.spec, n_ctx, self._backend.buffer_type, page_tokens, resident)

    @property
    def backend(self) -> Backend:
        """What computes."""
        return self._backend

    @property
    def own(self) -> EngineSequence:
        """The engine's own sequence."""
        return self._first

    def drop(self, sequence: EngineSequence) -> None:
        """Frees the rows and states of a sequence."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)
            self.graphs.forget(sequence.state)
            sequence.state.close()

    def require_layers(self, first: int, last: int) -> None:
        """Raises EngineError when the file does not hold the layers [first, last)."""
        layers = self.spec.layers
        if not layers.start <= first < last <= layers.stop:
            raise EngineError(
                f"layers [{first}, {last}) are not in [{layers.start}, {layers.stop}) of this file"
            )
        if first == 0 and not self.spec.has_embedding:
            raise EngineError("the file has no token embedding")

    def describe(self) -> dict[str, Any]:
        """Which kernels, layouts and device run, for logs and benches."""
        return {
            "wheel": WHEEL_VERSION,
            "ggml": lib.ggml_version().decode(),
            "device": self._backend.device.name,
            "device_description": self._backend.device.description,
            "passed_over": "; ".join(self.passed_over) or "nothing",
            "n_threads": self._backend.n_threads,
            "attention": self._attention_text(),
            "kv_type": "f16",
            "weights": dict(self._weights.placement),
            "n_ctx": self.n_ctx,
            "n_ubatch": self.n_ubatch,
            "state_bytes": sum(sequence.state.n_bytes for sequence in self._sequences),
            "compute_bytes": self.graphs.compute_bytes,
        }

    def _attention_text(self) -> str:
        if self.decoding.path == "fused":
            return "fused"
        return f"paged ({self.decoding.page_tokens} keys a page, {self.decoding.group_pages} pages a group)"

    def close(self) -> None:
        """Frees everything; spans are dead afterwards. Calling it again does nothing."""
        for sequence in tuple(self._sequences):
            self.drop(sequence)
        self.graphs.close()
        self._inputs.close()
        self._weights.close()
        self._backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
