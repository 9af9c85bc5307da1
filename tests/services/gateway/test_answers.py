"""Answers and errors have OpenAI's shapes, and streams are lines a client can split. Method: plain expectations."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import errors
from common.wire import messages as m
from services.gateway import sse
from services.gateway.answers import Usage, Voice, report_body
from services.gateway.choices import Spelled, TokenTold
from services.gateway.failures import INTERNAL, HostFailure, error_body, status_of, unknown_model
from services.gateway.tally import outcome_of

VOICE = Voice("chatcmpl-1", "a-model", 1234, chat=True)


def test_a_whole_chat_answer():
    assert VOICE.whole([VOICE.choice(0, "hi", "stop")], Usage(3, 2, 1)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1234,
        "model": "a-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


TOLD = [
    TokenTold(Spelled(b"a", -0.5), (Spelled(b"a", -0.5), Spelled(b"\xf0\x9f", -1.5)), 0),
    TokenTold(Spelled(b"\x98", -2.5), (), 1),
]


def test_logprobs_have_openais_shape_and_exact_bytes():
    choice = VOICE.choice(2, "a", "stop", TOLD)
    assert choice["index"] == 2
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "a",
                "bytes": [97],
                "logprob": -0.5,
                "top_logprobs": [
                    {"token": "a", "bytes": [97], "logprob": -0.5},
                    {"token": "\ufffd", "bytes": [0xF0, 0x9F], "logprob": -1.5},
                ],
            },
            {"token": "\ufffd", "bytes": [0x98], "logprob": -2.5, "top_logprobs": []},
        ],
        "refusal": None,
    }
    assert VOICE.piece("a", 2, TOLD)["choices"][0]["logprobs"] == choice["logprobs"]
    assert VOICE.choice(0, "", "stop", [])["logprobs"]["content"] == []


def test_a_completions_logprobs_are_parallel_lists_with_the_chosen_token_among_the_top():
    voice = Voice("cmpl-1", "a-model", 1, chat=False)
    assert voice.choice(0, "a", "stop", TOLD)["logprobs"] == {
        "tokens": ["a", "\ufffd"],
        "token_logprobs": [-0.5, -2.5],
        "top_logprobs": [{"a": -0.5, "\ufffd": -1.5}, {"\ufffd": -2.5}],
        "text_offset": [0, 1],
    }


def test_chunks_carry_usage_null_only_when_usage_was_asked():
    asked = Voice("x", "a-model", 1, chat=False, include_usage=True)
    assert asked.opening() is None
    assert asked.piece("t")["usage"] is None and asked.piece("t")["choices"][0]["text"] == "t"
    assert "usage" not in VOICE.piece("t")
    assert asked.usage_chunk(Usage(1, 1))["choices"] == []


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_an_event_is_one_line_and_gives_the_text_back(text):
    data = sse.event(VOICE.piece(text))
    line, end = data[:-2], data[-2:]
    assert end == b"\n\n" and b"\n" not in line and b"\r" not in line
    assert json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_comment_is_one_line_whatever_it_says(text):
    line = sse.comment(text)
    assert line.startswith(b": ") and line.endswith(b"\n\n")
    assert b"\n" not in line[:-2] and b"\r" not in line[:-2]


def test_a_report_leaves_the_trace_of_ubatches_out():
    report = report_body(m.ReadReport(tokens_worker=9), seed=4, first_token_s=0.5, total_s=1.0)
    assert (report["tokens_worker"], report["seed"], report["total_s"]) == (9, 4, 1.0)
    assert "stages" not in report
    json.dumps(report)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "outcome"),
    [
        (errors.RequestError("x", param="p"), 400, "invalid_request_error", None, "refused"),
        (
            errors.ContextExceededError(9, 8),
            400,
            "exceed_context_size_error",
            "context_length_exceeded",
            "refused",
        ),
        (unknown_model("a", "b"), 404, "invalid_request_error", "model_not_found", "refused"),
        (HostFailure(103, "full"), 429, "rate_limit_error", "server_busy", "busy"),
        (HostFailure(602, "late"), 503, "server_error", "service_unavailable", "deadline"),
        (HostFailure(401, "no memory"), 503, "server_error", "service_unavailable", "error"),
        (HostFailure(99_999, "new to us"), 500, "server_error", None, "error"),
        (ValueError("secret detail"), 500, "server_error", "internal_error", "error"),
    ],
)
def test_every_error_has_status_shape_and_outcome(error, status, kind, code, outcome):
    body = error_body(error)["error"]
    assert (status_of(error), body["type"], body["code"], outcome_of(error)) == (status, kind, code, outcome)
    assert body["message"] == (str(error) if isinstance(error, errors.OutriggerError) else INTERNAL)
