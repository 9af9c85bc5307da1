"""The HTTP side speaks OpenAI's API as OpenAI's own client expects it, and nothing a client sends breaks it.

Method: the real gateway over real sockets (rig.py), the `openai` package, and raw requests from hypothesis.
"""

from __future__ import annotations

import json
import socket

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import messages as m
from tests.services.gateway.rig import N_CTX, WAIT_S, chat_body, events

pytestmark = pytest.mark.model

TEXTS = [
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "你好，世界！我们去吃饭吧。",
    "Family: 👨‍👩‍👧‍👦, flag: 🇨🇿, skin: 👍🏽, done 😀",
    "line one\n\n\tline two  \r\n",
    "x",
    "",
]


@pytest.fixture
def client(rig):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{rig.port}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:
        yield client


def ask(client, **fields):
    fields = {"model": "smollm2-135m-instruct-q4_1"} | chat_body(**fields)
    return client.chat.completions.create(**fields)


@pytest.mark.parametrize("text", TEXTS, ids=["czech", "chinese", "emoji", "blank", "short", "empty"])
def test_streamed_text_equals_whole_text_in_any_script(rig, client, text):
    rig.say(text)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    whole = ask(client)
    assert whole.choices[0].message.content == text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({(c.id, c.model, c.created, c.object) for c in chunks}) == 1
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(rig.prompts.vocabulary.tokenize(text))
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_usage_comes_only_when_asked(rig, client):
    rig.say("hello")
    chunks = list(ask(client, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_completions_speak_their_own_shape(rig, client):
    rig.say("upon a time")
    model = rig.prompts.model_name
    whole = client.completions.create(model=model, prompt="Once")
    chunks = list(client.completions.create(model=model, prompt="Once", stream=True))
    assert whole.object == "text_completion" and whole.choices[0].text == "upon a time"
    assert "".join(chunk.choices[0].text for chunk in chunks) == "upon a time"


def test_models_are_listed(rig, client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == rig.prompts.model_name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_what_was_asked_reaches_the_host(rig, client):
    ask(client, temperature=0.5, seed=7, max_tokens=9, extra_body={"top_k": 3, "min_p": 0.1})
    (generate,) = [message for message in rig.host.told if isinstance(message, m.Generate)]
    assert generate.sampling == m.Sampling(temperature=0.5, top_k=3, min_p=0.1, seed=7)
    assert generate.max_tokens == 9
    assert set(generate.stop_token_ids) == rig.prompts.vocabulary.end_ids


@pytest.mark.parametrize("text", TEXTS)
def test_text_goes_to_token_ids_and_back(rig, text):
    status, body = rig.request("POST", "/tokenize", {"content": text})
    assert status == 200
    assert rig.request("POST", "/detokenize", body) == (200, {"content": text})


def test_token_ids_outside_the_vocabulary_are_refused(rig):
    status, body = rig.request("POST", "/detokenize", {"tokens": [5, 49152]})
    assert status == 400 and "49152 is outside the vocabulary (0 to 49151)" in body["error"]["message"]
    status, body = rig.request("POST", "/detokenize", {"tokens": [-5]})
    assert status == 400 and body["error"]["param"] == "tokens[0]"


def test_max_tokens_ends_an_answer_with_length(rig, client):
    rig.say("one two three four five six")
    answer = ask(client, max_tokens=2)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 2


def test_a_stop_string_ends_the_answer_and_frees_the_host(rig, client):
    rig.say("one two three " * 100)
    for stream in (False, True):
        rig.host.told.clear()
        answer = ask(client, stop=["three", "never"], stream=stream)
        if stream:
            chunks = list(answer)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert (text, reason) == ("one two ", "stop")
        assert any(isinstance(message, m.Cancel) for message in rig.host.told)


def test_long_answers_get_credit_as_they_are_taken(rig, client):
    n_tokens = N_CTX - 40
    rig.say(" a" * n_tokens)
    answer = ask(client)
    assert answer.usage.completion_tokens == n_tokens
    assert any(isinstance(message, m.GrantTokens) for message in rig.host.told)


def test_a_report_comes_when_asked(rig):
    rig.say("hello")
    headers = {"X-Outrigger-Report": "1"}
    _, body = rig.request("POST", "/v1/chat/completions", chat_body(seed=5), **headers)
    assert body["outrigger"]["tokens_host"] == body["usage"]["prompt_tokens"]
    assert (body["outrigger"]["seed"], body["outrigger"]["prefill_s"]) == (5, 0.25)
    assert 0 <= body["outrigger"]["first_token_s"] <= body["outrigger"]["total_s"]
    with rig.connection() as connection:
        data = json.dumps(chat_body(stream=True))
        connection.request(
            "POST", "/v1/chat/completions", data, {"Content-Type": "application/json"} | headers
        )
        found, _ = events(connection.getresponse())
    assert ["outrigger" in event for event in found[:-1]] == [False] * (len(found) - 2) + [True]
    assert "outrigger" not in rig.chat()[1]


def test_a_prompt_over_the_context_names_both_numbers(rig, client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "word " * 600}])
    error = caught.value.body
    assert error["type"] == "exceed_context_size_error" and error["code"] == "context_length_exceeded"
    assert error["n_ctx"] == N_CTX < error["n_prompt_tokens"]
    assert str(N_CTX) in error["message"] and str(error["n_prompt_tokens"]) in error["message"]


def test_a_failure_of_the_host_has_its_status(rig, client):
    async def refuse(host, asked, ids, peer):
        await host.send(m.Failed(asked.request_id, 103, "64 requests wait already"), peer)

    rig.host.behave = refuse
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError, match="64 requests wait already"):
            ask(client, stream=stream)


def test_an_error_in_the_middle_of_a_stream_is_an_event(rig, client):
    async def break_off(host, asked, ids, peer):
        await host.send(m.TokenReady(asked.request_id, 0, int(ids[-1])), peer)
        await host.send(m.Failed(asked.request_id, 400, "the logit of token id 3 is nan"), peer)

    rig.host.behave = break_off
    with pytest.raises(openai.APIError, match="the logit of token id 3 is nan"):
        list(ask(client, stream=True))
    with pytest.raises(openai.InternalServerError, match="the logit of token id 3 is nan"):
        ask(client)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [
        ("GET", "/nowhere", None, {}, 404, "unknown_url"),
        ("GET", "/v1/chat/completions", None, {}, 405, "method_not_allowed"),
        ("POST", "/v1/models", b"{}", {}, 405, "method_not_allowed"),
        (
            "POST",
            "/v1/chat/completions",
            b"{}",
            {"Content-Type": "text/plain"},
            415,
            "unsupported_content_type",
        ),
        ("POST", "/v1/chat/completions", b"{}", {"Content-Encoding": "gzip"}, 400, "unreadable_body"),
        (
            "POST",
            "/v1/chat/completions",
            b"{}",
            {"Content-Encoding": "compress"},
            415,
            "unsupported_content_encoding",
        ),
        ("POST", "/v1/chat/completions", b"{}", {}, 400, None),
        ("POST", "/v1/chat/completions", chat_body(model="gpt-4"), {}, 404, "model_not_found"),
        ("POST", "/v1/chat/completions", chat_body(store=True), {}, 400, "unsupported_parameter"),
        ("POST", "/v1/chat/completions", b" " * (18 << 20), {}, 413, "body_too_large"),
        ("GET", "/v1/models", None, {"Host": "evil.example"}, 403, "foreign_host"),
    ],
)
def test_every_refusal_has_openais_shape(rig, method, path, body, headers, status, code):
    got, answer = rig.request(method, path, body, **headers)
    assert (got, answer["error"]["code"]) == (status, code)
    assert answer["error"].keys() >= {"message", "type", "param", "code"} and answer["error"]["message"]


fields = st.sampled_from(
    [
        "messages",
        "prompt",
        "temperature",
        "max_tokens",
        "stop",
        "stream",
        "seed",
        "n",
        "model",
        "top_k",
        "zzz",
    ]
)
wild = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    body=st.binary(max_size=60) | st.dictionaries(fields, wild, max_size=5),
    whole=st.booleans(),
)
def test_no_body_is_ever_a_500_or_a_hang(shared_rig, path, body, whole):
    if isinstance(body, dict) and whole:
        body = (chat_body() if "chat" in path else {"prompt": "hi"}) | body
    data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    with shared_rig.connection() as connection:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    assert response.status in (200, 400, 404)
    if response.status != 200:
        assert json.loads(answer)["error"]["message"]


def test_a_client_that_speaks_no_http_leaves_no_trace_in_the_log(rig, caplog):
    with socket.create_connection(("127.0.0.1", rig.port), timeout=WAIT_S) as raw:
        raw.sendall(b"\0\1\2\3\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.0 400")
    assert [record.exc_info for record in caplog.records if record.exc_info] == []


@settings(max_examples=60)
@given(data=st.binary(min_size=1, max_size=200))
def test_no_bytes_on_the_socket_stop_the_server(shared_rig, data):
    with socket.create_connection(("127.0.0.1", shared_rig.port), timeout=WAIT_S) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + data + b"\r\n\r\n")
        raw.shutdown(socket.SHUT_WR)
        answer = b""
        while part := raw.recv(65536):
            answer += part
    assert not answer.startswith(b"HTTP/1.1 5")
    assert shared_rig.request("GET", "/health")[0] == 200
