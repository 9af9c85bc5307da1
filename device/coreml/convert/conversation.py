"""A conversation with a bundle, run by the interpreter as an app would run it: embeddings, chunks over one state, head.

It also is the description, in code, of what an app has to pass: masks, positions, partial batches. Slow and exact; the
oracle of the proofs. Called by proof.py and tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import PredictionError
from device.coreml.convert.manifest import Manifest
from device.coreml.convert.programs import OUTPUT
from device.coreml.reference import Arithmetic, Program, State

F16 = np.float16


class Conversation:
    """One state over the parts of a bundle. `n` tokens have been read."""

    def __init__(
        self, folder: Path, arithmetic: Arithmetic | None = None, load: Callable[[Path], Any] | None = None
    ) -> None:
        """`load` opens a part; the interpreter's programs if nothing is said (bundle_check brings Core ML's)."""
        self.manifest = manifest = Manifest.read(folder)
        load = load or (lambda path: Program.load(path, arithmetic))
        parts = {
            kind: [load(folder / part.package) for part in manifest.parts if part.kind == kind]
            for kind in ("embeddings", "chunk", "head")
        }
        (self.embeddings,), self.chunks, (self.head,) = parts["embeddings"], parts["chunk"], parts["head"]
        self.context, self.batch = int(manifest.options["context"]), int(manifest.options["batch"])
        self.window = int(manifest.model["window"])
        self.state: State = self.chunks[0].make_state("infer")
        self.n = 0

    def restart(self) -> None:
        """An empty state again."""
        self.state, self.n = self.chunks[0].make_state("infer"), 0

    def read(self, tokens: np.ndarray, one_by_one: bool = False) -> list[np.ndarray]:
        """Read token ids i32 [n]: residuals f16 [n, n_embd] after each chunk; the last one is normed.

        In batches, the last of them partial, or one token a call.
        """
        step = 1 if one_by_one else self.batch
        pieces = [self._call(tokens[at : at + step], not one_by_one) for at in range(0, len(tokens), step)]
        return [np.concatenate(each) for each in zip(*pieces, strict=True)]

    def logits(self, normed: np.ndarray) -> np.ndarray:
        """f32 [n, n_vocab] of rows of the last chunk's output, one call a row."""
        rows = []
        for row in normed:
            out = self.head.predict({"hidden_states": row[None, None]})
            rows.append(np.concatenate([out[f"logits{i + 1}"][0, 0] for i in range(len(out))]))
        return np.stack(rows).astype(np.float32)

    def _call(self, tokens: np.ndarray, as_batch: bool) -> list[np.ndarray]:
        n, first = len(tokens), self.n
        if first + n > self.context:
            raise PredictionError(f"{first + n} tokens do not fit the context of {self.context}")
        name = "prefill" if as_batch else "infer"
        if f"{name}_rotate" in self.chunks[0].functions and first + n > self.window:
            name += "_rotate"
        ids = np.zeros((1, self.batch if as_batch else 1), np.int32)
        ids[0, :n] = tokens
        hidden = self.embeddings.predict({"input_ids": ids})["hidden_states"]
        inputs = features(first, n, ids.shape[1], self.context, as_batch)
        outputs = []
        for chunk in self.chunks:
            hidden = chunk.predict({"hidden_states": hidden, **inputs}, function=name, state=self.state)[
                OUTPUT
            ]
            outputs.append(hidden[0, :n])
        self.n += n
        return outputs


def features(first: int, n: int, n_rows: int, context: int, as_batch: bool) -> dict[str, Any]:
    """Positions and masks of a call for `n` tokens from position `first`, padded to `n_rows`.

    Rows beyond n repeat the last position and see what it sees; the update mask has no 1 for them, so that they
    leave no trace.
    """
    positions = np.minimum(first + np.arange(n_rows), first + n - 1).astype(np.int32)
    sees = np.arange(context)[None, :] <= positions[:, None]
    inputs: dict[str, Any] = {
        "position_ids": positions,
        "causal_mask": np.where(sees, F16(0), F16(-np.inf))[None, None],
        "current_pos": np.array([first], np.int32),
    }
    if as_batch:
        update_mask = np.zeros((1, 1, context, n_rows), F16)
        update_mask[0, 0, first + np.arange(n), np.arange(n)] = 1
        inputs["update_mask"] = update_mask
    return inputs
