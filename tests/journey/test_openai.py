"""A person points OpenAI's own client at a running system, and it behaves as they expect.

Method: `outrigger run` with every process real, gateway to worker; the `openai` package and plain HTTP outside.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request

import openai
import pytest

from tests.journey.system import WAIT_S, until

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct-q4_1"
PROMPTS = {
    "english": "Name three things a boat needs.",
    "czech": "Přelož do angličtiny: Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "chinese": "请用中文重复这句话：你好，世界！今天天气很好。",
    "emoji": "Repeat exactly, many times: 😀🇨🇿👨‍👩‍👧 😀🇨🇿👨‍👩‍👧 😀🇨🇿👨‍👩‍👧",
}


@pytest.fixture(scope="module")
def client(system):
    with openai.OpenAI(base_url=system.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client, text: str, **fields):
    fields = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0} | fields
    return client.chat.completions.create(**fields)


def health(system) -> dict:
    try:
        with urllib.request.urlopen(system.url.removesuffix("/v1") + "/health", timeout=WAIT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


@pytest.mark.parametrize("name", PROMPTS)
def test_streams_say_the_same_as_whole_answers(client, name):
    whole = ask(client, PROMPTS[name], max_tokens=24)
    chunks = list(
        ask(client, PROMPTS[name], max_tokens=24, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens <= 24
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(client):
    def story(seed):
        return (
            ask(client, "Invent a name.", temperature=1.5, seed=seed, max_tokens=16)
            .choices[0]
            .message.content
        )

    assert story(1) == story(1)
    assert len({story(seed) for seed in range(2, 6)}) > 1


def test_a_long_prompt_is_read_with_the_worker_and_says_so(client, system):
    until(lambda: health(system)["worker"]["state"] == "ready")
    text = "The river was wide and the boat was small. " * 60 + "How was the river?"
    answer = ask(client, text, max_tokens=4, extra_headers={"X-Outrigger-Report": "1"})
    report = answer.model_extra["outrigger"]
    assert (
        report["tokens_cache"] + report["tokens_host"] + report["tokens_worker"] == answer.usage.prompt_tokens
    )
    assert report["tokens_worker"] > 0 and report["bypass_reason"] == "" and report["fallbacks"] == []


def test_a_stop_string_never_leaks(client):
    whole = ask(client, PROMPTS["english"], max_tokens=24).choices[0].message.content
    stop = whole[8:12]
    stopped = ask(client, PROMPTS["english"], max_tokens=24, stop=stop)
    assert stopped.choices[0].message.content == whole[: whole.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


def test_a_client_that_leaves_frees_the_host(client, system):
    stream = ask(client, "Tell a very long story.", max_tokens=1500, stream=True)
    next(iter(stream))
    until(lambda: health(system)["requests_running"] == 1)
    stream.close()
    until(lambda: health(system)["requests_running"] == 0)
    assert ask(client, "Still there?", max_tokens=2).usage.completion_tokens <= 2


def test_a_prompt_over_the_context_is_refused_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "word " * 3000)
    assert caught.value.body["n_ctx"] == 2048 < caught.value.body["n_prompt_tokens"]


def test_wrong_requests_have_the_clients_own_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        ask(client, "hi", model="gpt-4")
    with pytest.raises(openai.BadRequestError, match="temperature must be a number from 0 to 2, not 3"):
        ask(client, "hi", temperature=3)
    with pytest.raises(openai.BadRequestError, match="tools"):
        ask(client, "hi", tools=[{"type": "function", "function": {"name": "f"}}])


def test_a_killed_host_is_told_and_comes_back(client, system):
    before = ask(client, PROMPTS["english"], max_tokens=12).choices[0].message.content
    stream = ask(client, "Tell a very long story.", max_tokens=1500, stream=True)
    next(iter(stream))
    os.kill(system.pid_of("mac"), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="the host process was lost"):
        list(stream)
    until(lambda: health(system).get("status") == "ok")
    assert ask(client, PROMPTS["english"], max_tokens=12).choices[0].message.content == before
    until(lambda: health(system)["worker"]["state"] == "ready")
