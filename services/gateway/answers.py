"""Pieces of an answer to OpenAI-shaped bodies: whole answers and chunks of streams, for both kinds of request.

Pure: the id, the time and the model's name are handed in once and are the same in every chunk of an answer.
Called by server.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.wire.messages import ReadReport
from services.gateway.choices import FinishReason, Spelled, TokenTold


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

    def opening(self, choice: int = 0) -> dict[str, Any] | None:
        """The first chunk of a choice of a chat stream names the role; a completion stream has no such chunk."""
        return self._chunk(choice, {"role": "assistant", "content": ""}) if self.chat else None

    def piece(self, text: str, choice: int = 0, told: Sequence[TokenTold] = ()) -> dict[str, Any]:
        """One chunk with text, and with what is told of tokens."""
        return self._chunk(choice, {"content": text} if self.chat else text, told=told)

    def closing(self, reason: FinishReason, choice: int = 0) -> dict[str, Any]:
        """The chunk that says why a choice ended."""
        return self._chunk(choice, {} if self.chat else "", reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk after the closing one, when usage was asked for: no choices."""
        return self._frame(stream=True) | {"choices": [], "usage": usage.body()}

    def choice(
        self, index: int, text: str, reason: FinishReason, told: Sequence[TokenTold] | None = None
    ) -> dict[str, Any]:
        """One choice of an answer without a stream. told: None when nobody asked for log-probabilities."""
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
        if told is not None:
            choice["logprobs"] = self._logprobs(told)
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return choice

    def whole(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """The answer to a request without a stream."""
        return self._frame(stream=False) | {"choices": choices, "usage": usage.body()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, str] | str,
        reason: FinishReason | None = None,
        told: Sequence[TokenTold] = (),
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta" if self.chat else "text": delta,
            "logprobs": self._logprobs(told) if told else None,
            "finish_reason": reason,
        }
        body = self._frame(stream=True) | {"choices": [choice]}
        return body | {"usage": None} if self.include_usage else body

    def _logprobs(self, told: Sequence[TokenTold]) -> dict[str, Any]:
        return chat_logprobs(told) if self.chat else completion_logprobs(told)

    def _frame(self, *, stream: bool) -> dict[str, Any]:
        if not self.chat:
            kind = "text_completion"
        else:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model}


def chat_logprobs(told: Sequence[TokenTold]) -> dict[str, Any]:
    """OpenAI's logprobs object of a chat choice."""
    content = [
        _spelled(token.chosen) | {"top_logprobs": [_spelled(other) for other in token.top]} for token in told
    ]
    return {"content": content, "refusal": None}


def _spelled(token: Spelled) -> dict[str, Any]:
    return {"token": token.text, "bytes": list(token.data), "logprob": token.logprob}


def completion_logprobs(told: Sequence[TokenTold]) -> dict[str, Any]:
    """OpenAI's older logprobs object, of a completion: parallel lists; the token chosen is always among the top ones.

    Of tokens that are written alike the likeliest is named.
    """
    tops = []
    for token in told:
        likeliest: dict[str, float] = {}
        for one in (*token.top, token.chosen):
            likeliest.setdefault(one.text, one.logprob)
        tops.append(likeliest)
    return {
        "tokens": [token.chosen.text for token in told],
        "token_logprobs": [token.chosen.logprob for token in told],
        "top_logprobs": tops,
        "text_offset": [token.text_offset for token in told],
    }


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
