"""Stock llama.cpp of the same wheel: the oracle of parity tests and the baseline of the benches.

StockModel is a loaded file, StockContext one sequence of it. Options are those that decide which kernels run, so that
like is compared with like. Nothing the product computes passes through here.
"""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import numpy as np

from common.errors import EngineError, ModelError

from .llama import llama

FLASH_ATTENTION_ON, FLASH_ATTENTION_OFF = 1, 0


class StockModel:
    """A model file loaded by llama.cpp on the CPU. `repack` lets it rearrange weights as our engine does."""

    def __init__(self, path: str | Path, *, repack: bool) -> None:
        api = llama()
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        self.ptr = api.llama_model_load_from_file(str(path).encode(), params)
        if not self.ptr:
            raise ModelError(f"{path}: stock llama.cpp cannot load it")
        self.vocab = api.llama_model_get_vocab(self.ptr)
        self.n_vocab: int = api.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> np.ndarray:
        """Token ids i32 of a text, without special tokens around it."""
        raw = text.encode()
        ids = np.empty(len(raw) + 8, np.int32)
        pointer = ids.ctypes.data_as(C.POINTER(C.c_int32))
        n = llama().llama_tokenize(self.vocab, raw, len(raw), pointer, len(ids), False, False)
        if n < 0:
            raise EngineError(f"stock llama.cpp cannot tokenize a text of {len(raw)} bytes")
        return ids[:n].copy()

    def close(self) -> None:
        """Frees the model. Calling it again does nothing."""
        if self.ptr:
            llama().llama_model_free(self.ptr)
        self.ptr = None


class StockContext:
    """One sequence of a StockModel."""

    def __init__(
        self,
        model: StockModel,
        *,
        n_ctx: int,
        n_threads: int = 1,
        n_ubatch: int = 256,
        flash_attention: bool = True,
        swa_full: bool = True,
    ) -> None:
        """swa_full: whether sliding layers keep all rows, as ours do; by default stock drops rows out of sight."""
        api = llama()
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ubatch, n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = FLASH_ATTENTION_ON if flash_attention else FLASH_ATTENTION_OFF
        params.swa_full = swa_full
        self._model, self._n_ubatch = model, n_ubatch
        self.ptr = api.llama_init_from_model(model.ptr, params)
        if not self.ptr:
            raise EngineError(f"stock llama.cpp made no context of {n_ctx} tokens")

        self._batch = batch = api.llama_batch_init(n_ubatch, 0, 1)
        self._tokens, self._positions, self._wanted = (
            np.ctypeslib.as_array(array, (n_ubatch,)) for array in (batch.token, batch.pos, batch.logits)
        )
        for i in range(n_ubatch):
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0

    def decode(self, tokens: np.ndarray, position: int, logits: str = "last") -> np.ndarray:
        """Runs one ubatch of token ids from `position`; logits f32 [n_out, n_vocab] of `none`, `last` or `all` rows."""
        api, n = llama(), len(tokens)
        if not 1 <= n <= self._n_ubatch:
            raise EngineError(f"a ubatch has 1 to {self._n_ubatch} tokens, not {n}")
        self._batch.n_tokens = n
        self._tokens[:n] = tokens
        self._positions[:n] = np.arange(position, position + n)
        self._wanted[:n] = logits == "all"
        self._wanted[n - 1] = logits != "none"
        status = api.llama_decode(self.ptr, self._batch)
        if status:
            raise EngineError(f"stock llama.cpp failed with status {status} at position {position}")
        n_out = {"none": 0, "last": 1, "all": n}[logits]
        if n_out == 0:
            return np.empty((0, self._model.n_vocab), np.float32)
        return np.ctypeslib.as_array(api.llama_get_logits(self.ptr), (n_out, self._model.n_vocab)).copy()

    def use_threads(self, n_threads: int) -> None:
        """Computes on so many threads from now on."""
        llama().llama_set_n_threads(self.ptr, n_threads, n_threads)

    def truncate(self, n: int) -> None:
        """Forgets positions from n on. Raises EngineError where the model cannot (recurrent states)."""
        api = llama()
        if not api.llama_memory_seq_rm(api.llama_get_memory(self.ptr), 0, n, -1):
            raise EngineError(f"stock llama.cpp cannot go back to position {n} with this model")

    def clear(self) -> None:
        """Forgets the sequence."""
        api = llama()
        api.llama_memory_clear(api.llama_get_memory(self.ptr), True)

    def close(self) -> None:
        """Frees the context. Calling it again does nothing."""
        if self.ptr:
            llama().llama_free(self.ptr)
            llama().llama_batch_free(self._batch)
        self.ptr = None
