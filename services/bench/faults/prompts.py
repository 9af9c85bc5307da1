"""Prompts for reads under faults, and their right answers: those of a host that never had a worker.

A host holds one conversation, so a prompt that comes again after others is read from its beginning again. That is why
some prompts in turn suffice, and the host alone answers each of them once. Used by services.bench.faults.trial.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.bench.client import Answer
from services.bench.rig import Seat
from services.bench.texts import natural_tokens

N_PROMPTS = 24
TEXT_STEP = 3571
"""Tokens of text from one prompt to the next; more than a prompt has, so that none begins like another."""

Tokens = NDArray[np.int32]


class ColdPrompts:
    """Prompts of n_prompt tokens over the text; `alone` answers with n_tokens tokens."""

    def __init__(self, path: Path, alone: Seat, *, n_prompt: int, n_tokens: int) -> None:
        self.n_prompt = n_prompt
        self._path, self._alone, self._n_tokens = path, alone, n_tokens
        self._n_given = 0
        self._right: dict[bytes, Answer] = {}

    def next(self) -> Tokens:
        """i32 [n_prompt]: the next one of N_PROMPTS in turn."""
        skip = self._n_given % N_PROMPTS * TEXT_STEP
        self._n_given += 1
        return natural_tokens(self._path, self.n_prompt, skip=skip)

    def right(self, prompt: Tokens) -> Answer:
        """What the host alone answers to this prompt (one of ours, or a chat made of them)."""
        key = prompt.tobytes()
        if key not in self._right:
            self._right[key] = self._alone.client.generate(prompt, self._n_tokens)
        return self._right[key]
