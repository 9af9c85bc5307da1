"""Messages to prompt text, by the chat template that the model file carries.

Templates come from model files, so they run in a sandbox (template_sandbox.py): nothing outside is in reach, and one
that does not end is ended. They find what such templates are written for: messages, bos_token, eos_token,
add_generation_prompt, raise_exception, strftime_now, a tojson that leaves text readable, break and continue. Pure but
for the clock that is handed in. Called by prompt.py.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from common.errors import ModelError, RequestError
from services.gateway.template_sandbox import RENDERED_CHARS_MAX, RunawayError, Sandbox

RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"})
"""Names that chat_template_kwargs may not replace."""

SOURCE_CHARS_MAX = 1 << 20
RENDER_S_MAX = 10.0
"""Longest rendering: of the longest chats it takes tenths of a second."""


class _Refusal(Exception):
    """The template itself refused the messages."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    # jinja2's own tojson escapes for HTML, which a model would read as other text.
    separators = options.get("separators")
    sort_keys = bool(options.get("sort_keys", False))
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled chat template. `render` may be called from any thread."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """Compiles `source`. Raises ModelError when it is not a valid template."""
        if len(source) > SOURCE_CHARS_MAX:
            raise ModelError(
                f"the chat template has {len(source)} characters; at most {SOURCE_CHARS_MAX} are taken"
            )
        self._sandbox = environment = Sandbox()
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # jinja2's own errors, and a nesting that is too deep for Python
            raise ModelError(
                f"the model's chat template cannot be compiled: {error}; give another with OUTRIGGER_CHAT_TEMPLATE"
            ) from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt text for `messages` ({"role", "content"}, content a string), ready for the assistant's answer.

        `variables` are further names the template may know (enable_thinking, ...). Raises RequestError when one of
        them is reserved, or when the template refuses the messages (many want user and assistant to take turns).
        """
        variables = variables or {}
        if taken := RESERVED & variables.keys():
            raise RequestError(
                f"chat_template_kwargs may not set {sorted(taken)[0]!r}", param="chat_template_kwargs"
            )
        try:
            with self._sandbox.limited(RENDER_S_MAX):
                text = self._template.render(
                    messages=list(messages), add_generation_prompt=True, **self._tokens, **variables
                )
        except _Refusal as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        except RunawayError as error:
            raise RequestError(
                f"the model's chat template runs away on these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # whatever a template from a model file may do, it is a request that fails
            raise RequestError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        if len(text) > RENDERED_CHARS_MAX:
            raise RequestError(
                f"the chat template made {len(text)} characters; at most {RENDERED_CHARS_MAX} are taken"
            )
        return text
