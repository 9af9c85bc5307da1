"""Pieces of an answer, worded by a Voice: one after the other as chunks of a stream, or gathered into a whole body.

Pure; the same for every door. Called by replies.py.
"""

from __future__ import annotations

from typing import Any

from services.gateway.answers import Voice
from services.gateway.choices import FinishReason, TokenTold
from services.gateway.streams import ChoiceEnded, Ended, Piece, Wrote


def chunks_of(voice: Voice, piece: Piece) -> list[dict[str, Any]]:
    """What a stream says for one piece: its text and tokens, and the end of its choice. Often nothing."""
    if not isinstance(piece, Wrote | ChoiceEnded | Ended):
        return []
    chunks = [voice.piece(piece.text, piece.choice, piece.told)] if piece.text or piece.told else []
    if isinstance(piece, ChoiceEnded | Ended):
        chunks.append(voice.closing(piece.reason, piece.choice))
    return chunks


class Gathered:
    """An answer of `n_choices` that grows until its Ended."""

    def __init__(self, n_choices: int, *, wants_logprobs: bool) -> None:
        self._texts: list[list[str]] = [[] for _ in range(n_choices)]
        self._told: list[list[TokenTold]] = [[] for _ in range(n_choices)]
        self._reasons: dict[int, FinishReason] = {}
        self._wants_logprobs = wants_logprobs

    def add(self, piece: Piece) -> None:
        """Take in a piece; those that bring neither text nor an end change nothing."""
        if isinstance(piece, Wrote | ChoiceEnded | Ended):
            self._texts[piece.choice].append(piece.text)
            self._told[piece.choice].extend(piece.told)
        if isinstance(piece, ChoiceEnded | Ended):
            self._reasons[piece.choice] = piece.reason

    def body(self, voice: Voice, last: Ended) -> dict[str, Any]:
        """The whole answer, once its last piece is in."""
        choices = [
            voice.choice(
                index,
                "".join(texts),
                self._reasons[index],
                self._told[index] if self._wants_logprobs else None,
            )
            for index, texts in enumerate(self._texts)
        ]
        return voice.whole(choices, last.usage)
