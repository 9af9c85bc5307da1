"""Why a prompt stops being the continuation of the rows at hand: where it parts from them, and the likely cause.

Reads token ids only, so the cause is a guess from shapes: where the texts part, and whether they meet again soon. Pure.
Called by services.mac.sequence; told by services.mac.compute.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from services.mac.grid import common_prefix
from services.mac.landmarks import turn_borders

Cause = Literal["template_date", "system_prompt", "other_chat", "dropped_text", "edited_turn", "other_text"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""What a label may say. other_chat: the first turn (the system prompt, as a rule) is the same and the next is not.
other_text: the request named no tokens that end turns."""
MATCH_TOKENS = 12
"""So many equal tokens in a row count as the same text met again."""
DATE_TOKENS_MAX = 24
"""A changed piece up to so long, in the first turn, with the same text after it, is taken for a date."""
AROUND_TOKENS = 8

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Divergence:
    """A prompt and the tokens at hand share [0, position); `lost` rows that were at hand cannot be reused."""

    position: int
    lost: int
    cause: Cause
    held_ids: tuple[int, ...]
    """Token ids around the position, of the sequence at hand."""
    asked_ids: tuple[int, ...]
    """Token ids around the position, of the prompt."""


def find_divergence(
    held: Tokens, prompt: Tokens, turn_end_ids: Collection[int], *, n_rows: int, start: int
) -> Divergence | None:
    """How `prompt` i32 [n] parts from `held` i32 [n], whose rows [0, n_rows) were at hand and [0, start) are reused.

    None when nothing is lost by it, or when one merely continues (or repeats) the other.
    """
    position = common_prefix(held, prompt)
    if position >= min(len(held), len(prompt)) or start >= n_rows:
        return None
    turns_before = len(turn_borders(prompt[:position], turn_end_ids)) if turn_end_ids else None
    around = slice(max(0, position - AROUND_TOKENS), position + AROUND_TOKENS)
    return Divergence(
        position,
        n_rows - start,
        _cause(held[position:], prompt[position:], turns_before),
        tuple(held[around].tolist()),
        tuple(prompt[around].tolist()),
    )


def _cause(held: Tokens, asked: Tokens, turns_before: int | None) -> Cause:
    """Guess from what follows the point where they part, and from how many turns come before it."""
    if turns_before == 0:
        return "template_date" if _small_change(held, asked) else "system_prompt"
    if _find(asked[:MATCH_TOKENS], held) is not None:
        return "dropped_text"
    if turns_before is None:
        return "other_text"
    return "other_chat" if turns_before == 1 else "edited_turn"


def _small_change(held: Tokens, asked: Tokens) -> bool:
    """Whether a few tokens were replaced by a few others, and the same text goes on after them."""
    window = held[: DATE_TOKENS_MAX + MATCH_TOKENS]
    return any(_find(asked[n : n + MATCH_TOKENS], window) is not None for n in range(1, DATE_TOKENS_MAX + 1))


def _find(piece: Tokens, text: Tokens) -> int | None:
    """Where a piece of MATCH_TOKENS tokens occurs in `text`; None: nowhere, or the piece is shorter."""
    if len(piece) < MATCH_TOKENS or len(text) < MATCH_TOKENS:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(text, MATCH_TOKENS)
    found = np.flatnonzero((windows == piece).all(axis=1))
    return int(found[0]) if found.size else None
