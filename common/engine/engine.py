"""Engine: one model file made ready on one device. Loads, hands out LayerSpans, closes.

For one thread at a time; computing releases the interpreter lock. Used by services/mac, device/worker and the benches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import EngineError, UnsupportedOperationError
from common.ggml.backend import Backend, devices_for
from common.ggml.ffi import WHEEL_VERSION, lib
from common.limits import KV_PAD_TOKENS, N_CTX_MAX, UBATCH_TOKENS
from common.model.gguf import GgufFile
from common.model.layout import matrices
from common.model.spec import ModelSpec
from common.state.sequence import SequenceState

from .graphs import GraphCache
from .inputs import Inputs
from .sequence import EngineSequence
from .span import LayerSpan
from .weights import WeightLayout, Weights


class Engine:
    """Made by `Engine.load`.

    `spec` says what the model is, `n_ctx` how many positions fit, `n_ubatch` how many rows run in one pass.
    """

    def __init__(
        self, spec: ModelSpec, backend: Backend, weights: Weights, n_ctx: int, n_ubatch: int
    ) -> None:
        self.spec, self.n_ctx, self.n_ubatch = spec, n_ctx, n_ubatch
        self._backend, self._weights = backend, weights
        buffer_type = backend.buffer_type
        self.state = SequenceState(spec, n_ctx, buffer_type)
        window = spec.sliding.window if spec.sliding else None
        self._inputs = Inputs(spec.n_embd, n_ctx, n_ubatch, bool(spec.rope.sections), window, buffer_type)
        self.graphs = GraphCache(backend, weights, self.state, self._inputs)
        self._first = EngineSequence(self, self.state)
        self._sequences = [self._first]
        self.passed_over: tuple[str, ...] = ()
        """Better devices that lack an operation of this model, with what they lack."""

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
    ) -> Engine:
        """Loads the layers a GGUF file holds (a whole model or a tail).

        n_ctx is rounded up to a multiple of KV_PAD_TOKENS. Raises ModelError for the file, EngineError for everything
        else (OutOfMemoryError when memory is short).
        """
        if not 1 <= n_ctx <= N_CTX_MAX:
            raise EngineError(f"n_ctx is {n_ctx}; allowed are 1 to {N_CTX_MAX}")
        if not 1 <= n_ubatch <= N_CTX_MAX:
            raise EngineError(f"n_ubatch is {n_ubatch}; allowed are 1 to {N_CTX_MAX}")
        n_ctx = -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS
        spec = ModelSpec.read(path)
        passed_over: list[str] = []
        for candidate in devices_for(device):
            backend = Backend(candidate, n_threads)
            placed = Weights(GgufFile(path), backend, weights, matrices(spec))
            engine = cls(spec, backend, placed, n_ctx, min(n_ubatch, n_ctx))
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

    def sequence(self, n_ctx: int) -> EngineSequence:
        """A further sequence of up to n_ctx positions, at most the engine's; the same bits as in the engine's own.

        Raises EngineError for the size, OutOfMemoryError when memory is short.
        """
        if not 1 <= n_ctx <= self.n_ctx:
            raise EngineError(f"a sequence has 1 to {self.n_ctx} positions here, not {n_ctx}")
        n_ctx = -(-n_ctx // KV_PAD_TOKENS) * KV_PAD_TOKENS
        state = SequenceState(self.spec, n_ctx, self._backend.buffer_type)
        self._sequences.append(EngineSequence(self, state))
        return self._sequences[-1]

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
            "attention": "fused",
            "kv_type": "f16",
            "weights": dict(self._weights.placement),
            "n_ctx": self.n_ctx,
            "n_ubatch": self.n_ubatch,
            "state_bytes": sum(sequence.state.n_bytes for sequence in self._sequences),
            "compute_bytes": self.graphs.compute_bytes,
        }

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
