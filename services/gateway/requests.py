"""What a client may ask, as types: the bodies of the POST routes, and the parameters that are refused by name.

Field names, ranges and defaults are OpenAI's; top_k, min_p, repeat_penalty and chat_template_kwargs are extensions
under the names that llama.cpp's server uses. A parameter that is not built yet is refused by name, never ignored;
those in NOT_BUILT are let through while they ask for nothing. Pure types: reading.py fills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.limits import CHOICES_MAX, LOGIT_BIAS_MAX, N_CTX_MAX, N_VOCAB_MAX, TOP_LOGPROBS_MAX
from common.wire.messages import Sampling

LOGIT_BIAS_ABS_MAX = 100
STOPS_MAX = 16
STOP_CHARS_MAX = 1024
MESSAGES_MAX = 16_384

Stop = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
TopCount = Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)]
TokenCount = Annotated[int, Meta(ge=1, le=N_CTX_MAX)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class StreamOptions(_Strict, frozen=True, kw_only=True):
    """`include_usage`: one more chunk, with the usage and without choices, before the end of the stream."""

    include_usage: bool | None = None


class TextPart(msgspec.Struct, frozen=True, tag="text", tag_field="type", forbid_unknown_fields=True):
    """One part of a message's content."""

    text: str


class ChatMessage(_Strict, frozen=True, kw_only=True):
    """One message. The fields typed None are what an assistant message of ours carries when a client sends it back."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None

    @property
    def text(self) -> str:
        """The content as one text; parts are joined by line breaks."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class GenerationRequest(_Strict, frozen=True, kw_only=True):
    """What both kinds of request share. null means the default everywhere, as OpenAI's clients send it."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=N_VOCAB_MAX)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=LOGIT_BIAS_MAX)] | None = None
    """Numbers by token id; JSON's keys are strings. reading.py checks them one by one, to name the wrong one."""
    stop: Stop | Annotated[list[Stop], Meta(max_length=STOPS_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Who asks; taken and not used."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def n_choices(self) -> int:
        """Answers wanted."""
        return self.n or 1

    @property
    def n_tokens_asked(self) -> int | None:
        """Most tokens to generate; None is "as many as the context holds"."""
        return self.max_tokens

    @property
    def n_top_logprobs(self) -> int | None:
        """Likeliest tokens to be told with each token; None: no log-probabilities at all."""
        return None

    def sampling(self, fresh_seed: int) -> Sampling:
        """How tokens are chosen. OpenAI's defaults: temperature 1 and nothing cut off; temperature 0 is greedy.

        `fresh_seed` (32 bits) is used when the request names none. Seeds of 64 bits are folded to llama.cpp's 32.
        """
        seed = fresh_seed if self.seed is None else (self.seed ^ (self.seed >> 32)) & 0xFFFF_FFFF
        return Sampling(
            temperature=_or(self.temperature, 1.0),
            top_k=max(0, _or(self.top_k, 0)),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repeat_penalty=_or(self.repeat_penalty, 1.0),
            seed=min(seed, 0xFFFF_FFFE),  # 2^32 - 1 means "any seed" to llama.cpp
            logit_bias=tuple(
                (int(token_id), float(bias)) for token_id, bias in (self.logit_bias or {}).items()
            ),
        )


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def n_tokens_asked(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def n_top_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions: one prompt, as text, as a list with one text, or as token ids."""

    prompt: str | Annotated[list[str | int], Meta(min_length=1, max_length=N_CTX_MAX)]
    logprobs: TopCount | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        return self.logprobs


class TokenizeRequest(_Strict, frozen=True, kw_only=True):
    """Body of POST /tokenize, as llama.cpp's server takes it."""

    content: str
    add_special: bool = False
    """Add what the model wants around a text (BOS)."""
    parse_special: bool = True
    """Read control tokens in the text as such."""


class DetokenizeRequest(_Strict, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0, lt=N_VOCAB_MAX)]], Meta(max_length=N_CTX_MAX)]


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


NOT_BUILT: Mapping[type[msgspec.Struct], Mapping[str, tuple[Any, ...]]] = {
    ChatRequest: {
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "parallel_tool_calls": (None, True, False),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "response_format": (None, {"type": "text"}),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "metadata": (None, {}),
    },
    CompletionRequest: {
        "best_of": (None, 1),
        "echo": (None, False),
        "suffix": (None, ""),
    },
}
"""Parameters of OpenAI's that are not built, with the values at which they ask for nothing."""
