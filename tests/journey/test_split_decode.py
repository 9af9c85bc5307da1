"""Aim: with split decode the tokens are those of a whole host, also when the worker is killed in the middle of an
answer; what it cannot do comes to a client as an error with a name.
Method: real processes, those of the bench over a tiny hybrid, and `outrigger run` over the embedded model."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request

import pytest

from common.model.synthetic import ensure_preset
from services.bench.report import Report
from services.bench.split_decode import measure
from services.gateway.server import REPORT_HEADER
from tests.journey.system import running_system

pytestmark = pytest.mark.model


def ask(url, model, **more):
    """Status and body of a greedy completion."""
    body = {"model": model, "prompt": "The cable between", "max_tokens": 12, "temperature": 0} | more
    headers = {"Content-Type": "application/json", REPORT_HEADER: "1"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_worker_killed_mid_decode_changes_no_token(smollm2, tmp_path):
    """smollm2: the tiny hybrid takes its tokenizer from the embedded model. The bench refuses a token that differs."""
    out = io.StringIO()
    report = Report("split-decode", "tiny", quick=True, results_folder=tmp_path, out=out, err=out)
    measure("tiny", ensure_preset("tiny"), None, report)
    assert report.figures["tiny.reread_s"] > 0
    assert report.figures["tiny.host_ms"] > 0 and report.figures["tiny.worker_ms"] > 0


def test_the_api_answers_the_same_and_refuses_several_choices(system, smollm2):
    with running_system("--model", str(smollm2), "--n-ctx", "2048", "--split-decode") as split:
        status, found = ask(split.url, smollm2.stem, logprobs=1)
        assert status == 200
        right = ask(system.url, smollm2.stem, logprobs=1)[1]
        assert found["choices"][0]["text"] == right["choices"][0]["text"]
        assert found["choices"][0]["logprobs"] == right["choices"][0]["logprobs"]
        assert found["outrigger"]["tokens_host"] == 0 and found["outrigger"]["decode_worker_s"] > 0
        status, refused = ask(split.url, smollm2.stem, n=2)
        assert status == 400 and "one answer" in refused["error"]["message"]
