"""Requests become token ids as the model's template wants them, within the context. Method: the embedded model."""

from __future__ import annotations

import json

import pytest

from common.errors import ContextExceededError, RequestError, SettingError
from services.gateway.failures import HttpRefusal, error_body
from services.gateway.prompt import PromptReader
from services.gateway.reading import read_request
from services.gateway.requests import ChatRequest, CompletionRequest

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def reader(smollm2):
    reader = PromptReader.load(smollm2)
    yield reader
    reader.vocabulary.close()


def chat(**fields) -> ChatRequest:
    fields = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return read_request(json.dumps(fields).encode(), ChatRequest)


def completion(prompt, **fields) -> CompletionRequest:
    return read_request(json.dumps({"prompt": prompt, **fields}).encode(), CompletionRequest)


TURNS_OF_GEMMA = """\
{{ bos_token }}{% set first = namespace(prefix='') %}
{%- if messages[0].role == 'system' %}{% set first.prefix = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- (first.prefix if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


def test_a_template_file_serves_a_model_that_has_none(gemma3, tmp_path):
    """Gemma 3 270M is a base model; its vocabulary knows the turns that the instructed ones speak in."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello "}]
    (tmp_path / "turns.jinja").write_text(TURNS_OF_GEMMA)
    reader = PromptReader.load(gemma3, str(tmp_path / "turns.jinja"))
    words = reader.vocabulary
    bare = PromptReader("gemma", words)
    with pytest.raises(RequestError, match="carries no chat template; use /v1/completions, or give one with"):
        bare.job(chat(messages=messages), n_ctx=100, fresh_seed=1)
    job = reader.job(chat(messages=messages), n_ctx=100, fresh_seed=1)
    assert text_of(reader, job) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\n"
    )
    assert {words.token_text(end) for end in words.end_ids} >= {"<eos>", "<end_of_turn>"}
    with pytest.raises(RequestError, match="turns must alternate"):
        reader.job(chat(messages=messages[1:] * 2), n_ctx=100, fresh_seed=1)
    words.close()


def test_a_template_file_that_cannot_be_read_is_a_bad_setting(smollm2, tmp_path):
    with pytest.raises(SettingError, match=r"chat_template: cannot read .*absent\.jinja"):
        PromptReader.load(smollm2, str(tmp_path / "absent.jinja"))


def text_of(reader, job) -> str:
    return "".join(reader.vocabulary.token_text(int(i)) for i in job.ids)


def test_a_chat_is_rendered_by_the_models_template(reader):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    ]
    job = reader.job(chat(messages=messages, max_tokens=7), n_ctx=100, fresh_seed=5)
    assert text_of(reader, job) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (job.max_tokens, job.sampling.seed) == (7, 5)
    assert job.ids.dtype == "int32" and job.ids[0] == reader.vocabulary.bos_id


def test_an_answer_may_fill_the_context_and_not_more(reader):
    n_prompt = len(reader.job(chat(), n_ctx=1000, fresh_seed=0).ids)
    assert reader.job(chat(), n_ctx=1000, fresh_seed=0).max_tokens == 1000 - n_prompt
    assert reader.job(chat(max_tokens=5000), n_ctx=1000, fresh_seed=0).max_tokens == 1000 - n_prompt
    assert reader.job(chat(), n_ctx=n_prompt + 1, fresh_seed=0).max_tokens == 1
    with pytest.raises(ContextExceededError) as caught:
        reader.job(chat(), n_ctx=n_prompt, fresh_seed=0)
    body = error_body(caught.value)["error"]
    assert (body["type"], body["n_prompt_tokens"], body["n_ctx"]) == (
        "exceed_context_size_error",
        n_prompt,
        n_prompt,
    )
    assert str(n_prompt) in body["message"] and body["param"] == "messages"


def test_completions_take_text_or_token_ids(reader):
    text = reader.job(completion("Once upon"), n_ctx=100, fresh_seed=0).ids.tolist()
    assert reader.job(completion(["Once upon"]), n_ctx=100, fresh_seed=0).ids.tolist() == text
    assert reader.job(completion(text), n_ctx=100, fresh_seed=0).ids.tolist() == text


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "the prompt is empty"),
        ([1, 49152], r"prompt\[1\] must be a token id from 0 to 49151, not 49152"),
        ([-1], r"prompt\[0\] must be a token id"),
        (["a", "b"], "one text or a list of token ids"),
    ],
)
def test_prompts_that_are_none_are_refused(reader, prompt, words):
    with pytest.raises(RequestError, match=words):
        reader.job(completion(prompt), n_ctx=100, fresh_seed=0)


def test_another_models_name_is_not_found(reader):
    assert reader.job(chat(model=reader.model_name), n_ctx=100, fresh_seed=0).max_tokens > 0
    with pytest.raises(HttpRefusal, match="'gpt-4' does not exist here; this server runs 'smollm2") as caught:
        reader.job(chat(model="gpt-4"), n_ctx=100, fresh_seed=0)
    assert caught.value.status == 404 and error_body(caught.value)["error"]["code"] == "model_not_found"
