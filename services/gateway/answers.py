"""Pieces of an answer to OpenAI-shaped bodies: whole answers and chunks of streams, for both kinds of request.

Pure: the id, the time and the model's name are handed in once and are the same in every chunk of an answer.
Called by server.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from common.wire.messages import ReadReport

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written for one request."""

    n_prompt: int
    n_generated: int
    n_cached: int = 0

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_generated,
            "total_tokens": self.n_prompt + self.n_generated,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
        }


@dataclass(frozen=True, slots=True)
class Voice:
    """How one answer speaks. `chat` chooses between the shapes of the two kinds of request."""

    answer_id: str
    model: str
    created: int
    """Seconds since 1970."""
    chat: bool
    include_usage: bool = False
    """Streams only: every chunk has a usage field, null but in the last."""

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat stream names the role; a completion stream has no such chunk."""
        return self._chunk({"role": "assistant", "content": ""}) if self.chat else None

    def piece(self, text: str) -> dict[str, Any]:
        """One chunk with text."""
        return self._chunk({"content": text} if self.chat else text)

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """The chunk that says why the answer ended."""
        return self._chunk({} if self.chat else "", reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk after the closing one, when usage was asked for: no choices."""
        return self._frame(stream=True) | {"choices": [], "usage": usage.body()}

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> dict[str, Any]:
        """The answer to a request without a stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return self._frame(stream=False) | {"choices": [choice], "usage": usage.body()}

    def _chunk(self, delta: dict[str, str] | str, reason: FinishReason | None = None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta" if self.chat else "text": delta,
            "logprobs": None,
            "finish_reason": reason,
        }
        body = self._frame(stream=True) | {"choices": [choice]}
        return body | {"usage": None} if self.include_usage else body

    def _frame(self, *, stream: bool) -> dict[str, Any]:
        if not self.chat:
            kind = "text_completion"
        else:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


def model_body(name: str, created: int, n_ctx: int | None) -> dict[str, Any]:
    """One entry of GET /v1/models. `n_ctx` is ours: OpenAI's shape has no place for the context's size."""
    return {"id": name, "object": "model", "created": created, "owned_by": "outrigger", "n_ctx": n_ctx}


def report_body(
    report: ReadReport, *, seed: int, first_token_s: float | None, total_s: float
) -> dict[str, Any]:
    """The `outrigger` field of an answer: where the prompt was read, and the seconds of host and gateway."""
    read = msgspec.to_builtins(report)
    read.pop("stages", None)  # one entry an ubatch: for traces, not for answers
    return read | {"seed": seed, "first_token_s": first_token_s, "total_s": total_s}
