"""Bytes of a body to a request, or to an error that names the parameter, its value and what is allowed.

Pure. Every mistake a body can hold ends as a RequestError or UnsupportedParameterError; nothing is guessed or dropped.
Called by server.py with the bytes as they came, and by public_door.py with what they held.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from common.errors import RequestError, UnsupportedParameterError
from services.gateway.requests import (
    LOGIT_BIAS_ABS_MAX,
    MESSAGES_MAX,
    NOT_BUILT,
    ChatMessage,
    ChatRequest,
    GenerationRequest,
)

Request = TypeVar("Request", bound=msgspec.Struct)

VALUE_CHARS_MAX = 80

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,7}")
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]|(?P<other>\[.*?\])")
_TYPE_WORDS = {
    "`object`": "an object",
    "`array`": "an array",
    "`str`": "a string",
    "`int`": "an integer",
    "`float`": "a number",
    "`bool`": "true or false",
    "`null`": "null",
}


def read_request(body: bytes, kind: type[Request]) -> Request:
    """The request in a JSON body. Raises RequestError or UnsupportedParameterError, with `param` where there is one."""
    return read_fields(_decoded(body), kind)


def read_fields(raw: Any, kind: type[Request]) -> Request:
    """The request in a decoded body, whatever it was encoded in; takes parameters out of `raw`. Raises the same."""
    if not isinstance(raw, dict):
        raise RequestError(f"the body must be an object of parameters, not {_shown(raw)}")
    _refuse_not_built(raw, NOT_BUILT.get(kind, {}))
    try:
        request = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw, kind) from error
    except (RecursionError, OverflowError) as error:
        raise RequestError("the body is nested too deep, or holds a number out of range") from error
    if isinstance(request, GenerationRequest):
        _check_together(request)
    return request


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the JSON body is nested too deep") from error


def _refuse_not_built(raw: dict[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Takes parameters that ask for nothing out of `raw`; refuses those that ask for something not built."""
    for name in table.keys() & raw.keys():
        value = raw.pop(name)
        if not any(type(value) is type(nothing) and value == nothing for nothing in table[name]):
            raise UnsupportedParameterError(
                f"{name} = {_shown(value)} is not supported by this server; leave {name} out", param=name
            )


def _explain(text: str, raw: dict[str, Any], kind: type[msgspec.Struct]) -> RequestError:
    """Turns msgspec's words into ours: which parameter, what it was, what is allowed."""
    place = _PLACE.match(text)
    assert place is not None
    what, path = place["what"], (place["path"] or "").removeprefix(".")
    prefix = f"{path}." if path else ""
    if unknown := _UNKNOWN.match(what):
        name = prefix + unknown["name"][:VALUE_CHARS_MAX]
        return UnsupportedParameterError(
            f"unknown parameter {name}; check its spelling or leave it out", param=name
        )
    if missing := _MISSING.match(what):
        return RequestError(
            f"the parameter {prefix}{missing['name']} is missing", param=prefix + missing["name"]
        )
    allowed = _allowed(kind).get(re.sub(r"\[\d+\]", "[]", path)) or _in_words(what)
    return RequestError(f"{path} must be {allowed}, not {_shown(_value_at(raw, path))}", param=path or None)


def _in_words(what: str) -> str:
    """ "Expected `int | null`, got `str`" -> "an integer or null"."""
    if what.startswith("Invalid"):
        return "one of the values this server supports"
    allowed = what.removeprefix("Expected ").partition(", got ")[0]
    if "length" in allowed:
        return f"{_in_words_of_type(allowed.partition(' of ')[0])} of{allowed.partition(' of')[2]}"
    kind, _, bound = allowed.partition("` ")
    return f"{_in_words_of_type(kind.strip('`'))} {bound}".strip()


def _in_words_of_type(kinds: str) -> str:
    return " or ".join(_TYPE_WORDS.get(f"`{kind}`", kind) for kind in kinds.strip("`").split(" | "))


@functools.cache
def _allowed(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What msgspec does not say in full, by path: whole ranges of numbers, read off the types, and closed choices."""
    roles = msgspec.inspect.type_info(ChatMessage).fields[0].type.values  # type: ignore[attr-defined]
    allowed = {
        "messages": f"an array of 1 to {MESSAGES_MAX} messages",
        "messages[].role": "one of " + ", ".join(roles),
        "messages[].content[].type": '"text", the only kind of content this server reads',
    }
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        for one in getattr(field.type, "types", (field.type,)):
            if isinstance(one, msgspec.inspect.IntType | msgspec.inspect.FloatType) and one.ge is not None:
                word = "an integer" if isinstance(one, msgspec.inspect.IntType) else "a number"
                allowed[field.name] = f"{word} from {one.ge} to {one.le}"
    return allowed


def _value_at(raw: Any, path: str) -> Any:
    """The value at a path of msgspec's ("messages[0].role"); None where it cannot be followed."""
    value = raw
    for step in _STEP.finditer("." + path if path and not path.startswith("[") else path):
        try:
            value = value[step["key"] or int(step["index"] or "x")]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return value


def _shown(value: Any) -> str:
    """A value as JSON, shortened so that an error stays readable."""
    try:
        text = msgspec.json.encode(value).decode("utf-8", "replace")
    except (ValueError, RecursionError, OverflowError):
        text = "a value that cannot be shown"
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


def _check_together(request: GenerationRequest) -> None:
    """What types cannot say: parameters that do not go together."""
    _check_biases(request.logit_bias or {})
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream = true", param="stream_options")
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs = true", param="top_logprobs")
        both = (request.max_tokens, request.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise RequestError(
                f"max_tokens = {both[0]} and max_completion_tokens = {both[1]} contradict each other; give one",
                param="max_completion_tokens",
            )


def _check_biases(biases: Mapping[str, Any]) -> None:
    for token_id, bias in biases.items():
        name = f"logit_bias[{_shown(token_id)}]"
        if not _TOKEN_ID.fullmatch(token_id):
            raise RequestError(
                f"{name}: the keys of logit_bias are token ids, such as 1234", param="logit_bias"
            )
        if type(bias) not in (int, float) or not -LOGIT_BIAS_ABS_MAX <= bias <= LOGIT_BIAS_ABS_MAX:
            raise RequestError(
                f"{name} must be a number from {-LOGIT_BIAS_ABS_MAX} to {LOGIT_BIAS_ABS_MAX}, not {_shown(bias)}",
                param="logit_bias",
            )
