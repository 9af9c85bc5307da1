"""A request to what the host is asked: template, tokens, limits, and the Generate message.

Holds the vocabulary and the chat template of the served model; knows no HTTP and no bus. Safe to call from several
threads: long prompts are prepared off the event loop. Called by trip.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import ContextExceededError, RequestError, SettingError
from common.ggml.vocabulary import Vocabulary
from common.wire.messages import Sampling
from services.gateway.failures import unknown_model
from services.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from services.gateway.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Job:
    """What one request comes to."""

    ids: np.ndarray
    """The prompt, i32 [n_tokens]."""
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    n_choices: int = 1
    top_logprobs: int | None = None


def read_template(file: str) -> str:
    """The text of the Jinja file that settings name. Raises SettingError when it cannot be read, or is empty."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"gateway.chat_template: cannot read {file}: {error}; name a Jinja file (OUTRIGGER_CHAT_TEMPLATE)"
        ) from error
    if not text.strip():
        raise SettingError(
            f"gateway.chat_template: {file} is empty; name a Jinja file (OUTRIGGER_CHAT_TEMPLATE)"
        )
    return text


class PromptReader:
    """Turns requests for one model into jobs."""

    def __init__(self, model_name: str, vocabulary: Vocabulary, template: str | None = None) -> None:
        """template: takes the place of the model's own. Raises ModelError when it cannot be compiled."""
        self.model_name = model_name
        self.vocabulary = vocabulary
        template = template or vocabulary.chat_template
        self._template = (
            ChatTemplate(
                template,
                bos_token=_text_of(vocabulary, vocabulary.bos_id),
                eos_token=_text_of(vocabulary, vocabulary.eos_id),
            )
            if template
            else None
        )

    @classmethod
    def load(cls, path: Path, template_file: str = "") -> PromptReader:
        """The reader for a GGUF file; the model's name is the file's, without its ending.

        template_file: Jinja file used in place of the model's chat template; empty for none. Raises SettingError when
        it cannot be read.
        """
        template = read_template(template_file) if template_file else None
        return cls(path.stem, Vocabulary.load(path), template)

    def job(self, request: GenerationRequest, *, n_ctx: int, fresh_seed: int) -> Job:
        """Raises RequestError; ContextExceededError when the prompt leaves no room for one token in `n_ctx`."""
        if request.model is not None and request.model != self.model_name:
            raise unknown_model(request.model, self.model_name)
        if isinstance(request, ChatRequest):
            ids, param = self._chat_ids(request), "messages"
        elif isinstance(request, CompletionRequest):
            ids, param = self._completion_ids(request), "prompt"
        else:
            raise TypeError(type(request))
        if not ids:
            raise RequestError("the prompt is empty: it has no token to begin with", param=param)
        room = n_ctx - len(ids)
        if room < 1:
            error = ContextExceededError(len(ids), n_ctx)
            error.param = param
            raise error
        self._check_bias(request)
        asked = request.n_tokens_asked
        return Job(
            ids=np.asarray(ids, np.int32),
            max_tokens=room if asked is None else min(asked, room),
            sampling=request.sampling(fresh_seed),
            stops=request.stops,
            n_choices=request.n_choices,
            top_logprobs=request.n_top_logprobs,
        )

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Token ids of a text. Raises RequestError."""
        return self.vocabulary.tokenize(
            request.content, add_special=request.add_special, parse_special=request.parse_special
        )

    def detokenize(self, request: DetokenizeRequest) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD. Raises RequestError."""
        return b"".join(map(self.vocabulary.piece, request.tokens)).decode("utf-8", "replace")

    def _chat_ids(self, request: ChatRequest) -> list[int]:
        if self._template is None:
            raise RequestError(
                f"the model file of {self.model_name!r} carries no chat template; use /v1/completions, or "
                "give one with the setting chat_template",
                param="messages",
            )
        messages = []
        for message in request.messages:
            # Chat templates know the older word for the developer's instructions.
            role = "system" if message.role == "developer" else message.role
            entry = {"role": role, "content": message.text}
            messages.append(entry | {"name": message.name} if message.name is not None else entry)
        text = self._template.render(messages, request.chat_template_kwargs)
        return self._with_bos(self.vocabulary.tokenize(text, parse_special=True))

    def _completion_ids(self, request: CompletionRequest) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._with_bos(self.vocabulary.tokenize(prompt, parse_special=True))
        return self._checked_ids(prompt)

    def _check_bias(self, request: GenerationRequest) -> None:
        last = self.vocabulary.n_vocab - 1
        for token_id in map(int, request.logit_bias or ()):
            if token_id > last:
                raise RequestError(
                    f"logit_bias names token id {token_id}; allowed are 0 to {last}", param="logit_bias"
                )

    def _checked_ids(self, ids: Sequence[int | str]) -> list[int]:
        last = self.vocabulary.n_vocab - 1
        for place, token_id in enumerate(ids):
            if isinstance(token_id, str):
                raise RequestError("prompt must be one text or a list of token ids", param="prompt")
            if not 0 <= token_id <= last:
                raise RequestError(
                    f"prompt[{place}] must be a token id from 0 to {last}, not {token_id}",
                    param=f"prompt[{place}]",
                )
        return list(ids)  # type: ignore[arg-type]

    def _with_bos(self, ids: list[int]) -> list[int]:
        """BOS in front when the model wants one and the template (or the client) has not written it already."""
        bos_id = self.vocabulary.bos_id
        if self.vocabulary.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            return [bos_id, *ids]
        return ids


def _text_of(vocabulary: Vocabulary, token_id: int | None) -> str:
    return "" if token_id is None else vocabulary.token_text(token_id)
