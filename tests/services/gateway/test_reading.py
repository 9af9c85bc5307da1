"""A body becomes a request, or an error that names the parameter, its value and what is allowed.

Method: a table of what people get wrong, and hypothesis bodies of any JSON shape: none may raise anything else.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RequestError, UnsupportedParameterError
from services.gateway.reading import read_request
from services.gateway.requests import NOT_BUILT, ChatRequest, CompletionRequest

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
KINDS = [ChatRequest, CompletionRequest]
names = st.sampled_from(
    [*ChatRequest.__struct_fields__, "prompt", *NOT_BUILT[ChatRequest], "role", "content"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(names | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


def read_chat(**fields) -> ChatRequest:
    return read_request(json.dumps(HELLO | fields).encode(), ChatRequest)


def test_a_plain_request_has_openais_defaults():
    request = read_chat()
    sampling = request.sampling(fresh_seed=11)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, 11)
    assert (request.n_tokens_asked, request.stops, request.include_usage) == (None, (), False)


def test_null_is_the_default_everywhere():
    optional = {name: None for name in ChatRequest.__struct_fields__ if name != "messages"}
    nulls = read_chat(**optional, **dict.fromkeys(NOT_BUILT[ChatRequest]))
    assert nulls == read_chat()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": 3}, "temperature", "temperature must be a number from 0 to 2, not 3"),
        ({"temperature": "hot"}, "temperature", 'temperature must be a number from 0 to 2, not "hot"'),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer from 1 to 1048576, not 0"),
        ({"top_p": 1.5}, "top_p", "top_p must be a number from 0 to 1, not 1.5"),
        ({"stop": ""}, "stop", 'stop must be a string of length >= 1, not ""'),
        ({"stop": ["a", 5]}, "stop[1]", "stop[1] must be a string, not 5"),
        ({"stream": "yes"}, "stream", 'stream must be true or false or null, not "yes"'),
        ({"messages": []}, "messages", "messages must be an array of 1 to 16384 messages, not []"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role",
            'messages[0].role must be one of assistant, developer, system, user, not "tool"',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            'messages[0].content[0].type must be "text", the only kind of content this server reads, not "image_url"',
        ),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content",
            "the parameter messages[0].content is missing",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "stream_options is only allowed with stream = true",
        ),
        (
            {"n": 5},
            "n",
            "n must be an integer from 1 to 4, not 5",
        ),
        ({"n": True}, "n", "n must be an integer from 1 to 4, not true"),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs must be an integer from 0 to 20, not 21"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is only allowed with logprobs = true"),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias",
            'logit_bias["5"] must be a number from -100 to 100, not 101',
        ),
        (
            {"logit_bias": {"5": True}},
            "logit_bias",
            'logit_bias["5"] must be a number from -100 to 100, not true',
        ),
        (
            {"logit_bias": {"05": 1}},
            "logit_bias",
            'logit_bias["05"]: the keys of logit_bias are token ids, such as 1234',
        ),
        (
            {"max_tokens": 5, "max_completion_tokens": 6},
            "max_completion_tokens",
            "max_tokens = 5 and max_completion_tokens = 6 contradict each other; give one",
        ),
    ],
)
def test_a_wrong_value_is_named_with_value_and_range(fields, param, words):
    with pytest.raises(RequestError) as caught:
        read_chat(**fields)
    assert (caught.value.param, str(caught.value)) == (param, words)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("frequency_penality", 1),
    ],
)
def test_what_is_not_known_or_not_built_is_refused_by_name(name, value):
    with pytest.raises(UnsupportedParameterError, match=name) as caught:
        read_chat(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", []), ("response_format", {"type": "text"}), ("store", False), ("tool_choice", "none")],
)
def test_what_asks_for_nothing_is_let_through(name, value):
    assert read_chat(**{name: value}) == read_chat()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"messages": NaN}',
        b"[" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b'{"seed": 1e999}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_bytes_that_are_no_request_are_the_clients_error(body):
    for kind in KINDS:
        with pytest.raises(RequestError):
            read_request(body, kind)


@given(kind=st.sampled_from(KINDS), raw=st.dictionaries(names, values, max_size=6), whole=st.booleans())
def test_any_json_is_read_or_refused_with_words(kind, raw, whole):
    base = (HELLO if kind is ChatRequest else {"prompt": "hello"}) if whole else {}
    try:
        request = read_request(json.dumps(base | raw).encode(), kind)
    except RequestError as error:
        assert str(error)
    else:
        assert 0 <= request.sampling(fresh_seed=0).seed < 0xFFFF_FFFF


def test_choices_logprobs_and_biases_are_read_in_both_forms():
    chat = read_chat(n=3, logprobs=True, top_logprobs=4, logit_bias={"5": -100, "60000": 0.5})
    assert (chat.n_choices, chat.n_top_logprobs) == (3, 4)
    assert chat.sampling(fresh_seed=0).logit_bias == ((5, -100.0), (60000, 0.5))
    assert read_chat(logprobs=True).n_top_logprobs == 0
    assert read_chat(logprobs=False).n_top_logprobs is None and read_chat().n_choices == 1
    completion = read_request(b'{"prompt": "a", "logprobs": 3, "n": 2}', CompletionRequest)
    assert (completion.n_choices, completion.n_top_logprobs) == (2, 3)


@pytest.mark.parametrize(("name", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2)])
def test_what_completions_do_not_do_is_refused_by_name(name, value):
    with pytest.raises(UnsupportedParameterError, match=name) as caught:
        read_request(json.dumps({"prompt": "a", name: value}).encode(), CompletionRequest)
    assert caught.value.param == name


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_every_seed_is_folded_to_one_that_can_be_repeated(seed):
    folded = read_chat(seed=seed).sampling(fresh_seed=0).seed
    assert 0 <= folded < 0xFFFF_FFFF
    assert folded == seed or not 0 <= seed < 0xFFFF_FFFF
    assert folded == read_chat(seed=seed).sampling(fresh_seed=1).seed
