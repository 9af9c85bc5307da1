"""OpenAI's client asks for several choices, log-probabilities and biases, and gets what their documentation says.

Method: the running system of the other journeys, real processes all the way; no token is expected by heart.
"""

from __future__ import annotations

import json
import math
import urllib.request

import openai
import pytest

from tests.journey.system import WAIT_S

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct-q4_1"
QUESTION = [{"role": "user", "content": "Name a river."}]


@pytest.fixture(scope="module")
def client(system):
    with openai.OpenAI(base_url=system.url, api_key="none", max_retries=0, timeout=2 * WAIT_S) as client:
        yield client


def ask(client, **fields):
    return client.chat.completions.create(model=MODEL, messages=QUESTION, **({"max_tokens": 12} | fields))


def test_choices_have_seeds_of_their_own_and_usage_counts_the_prompt_once(client):
    how = {"temperature": 1.2, "seed": 40}
    several = ask(client, n=3, **how)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    alone = [ask(client, temperature=1.2, seed=40 + index) for index in range(3)]
    for choice, one in zip(several.choices, alone, strict=True):
        assert choice.message.content == one.choices[0].message.content
        assert choice.finish_reason == one.choices[0].finish_reason
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens
    assert several.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)


def test_streamed_choices_are_the_whole_ones(client):
    how = {"temperature": 1.2, "seed": 41, "n": 4, "max_tokens": 20}
    whole = ask(client, **how)
    texts, reasons, usage = [""] * 4, {}, None
    for chunk in ask(client, stream=True, stream_options={"include_usage": True}, **how):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after the end of a choice"
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_add_up_and_greedy_takes_the_likeliest(client):
    answer = ask(client, temperature=0, logprobs=True, top_logprobs=20)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in content).decode() == answer.choices[0].message.content
    for token in content:
        tops = [top.logprob for top in token.top_logprobs]
        assert tops == sorted(tops, reverse=True) and len(tops) == 20
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, tops[0])
        assert sum(map(math.exp, tops)) <= 1 + 1e-5
    streamed = []
    for chunk in ask(client, temperature=0, logprobs=True, top_logprobs=20, stream=True):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert streamed == content
    assert ask(client, temperature=0).choices[0].logprobs is None


def test_a_completions_logprobs_point_into_its_text(client):
    answer = client.completions.create(
        model=MODEL, prompt="The river", temperature=0, max_tokens=8, logprobs=2
    )
    told, text = answer.choices[0].logprobs, answer.choices[0].text
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    assert "".join(told.tokens) == text
    for token, offset, logprob, tops in zip(
        told.tokens, told.text_offset, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert text[offset : offset + len(token)] == token
        assert tops[token] == logprob and len(tops) <= 3


def test_a_banned_token_is_not_said_and_a_forced_one_is(client, system):
    plain = ask(client, temperature=0, logprobs=True, top_logprobs=1, max_tokens=1)
    first = plain.choices[0].message.content
    (token_id,) = tokenize(system, first)
    banned = ask(client, temperature=0, max_tokens=1, logit_bias={str(token_id): -100})
    assert banned.choices[0].message.content != first
    forced = ask(client, temperature=2, max_tokens=3, logit_bias={str(token_id): 100})
    assert forced.choices[0].message.content == first * 3
    with pytest.raises(openai.BadRequestError, match=r"token id 4000000; allowed are 0 to 49151"):
        ask(client, logit_bias={"4000000": 1})


def test_a_strong_frequency_penalty_leaves_less_to_repeat(client):
    def repeats(penalty):
        answer = client.completions.create(
            model=MODEL,
            prompt="la la la la la la",
            temperature=0,
            max_tokens=24,
            logprobs=0,
            frequency_penalty=penalty,
        )
        tokens = answer.choices[0].logprobs.tokens
        return len(tokens) - len(set(tokens))

    assert repeats(2) < repeats(0)


def tokenize(system, text: str) -> list[int]:

    body = json.dumps({"content": text}).encode()
    address = system.url.removesuffix("/v1") + "/tokenize"
    asked = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=WAIT_S) as response:
        return json.load(response)["tokens"]
