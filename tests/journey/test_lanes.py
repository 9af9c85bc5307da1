"""Long and short requests at once, and clients that leave: what people see of lanes, queue and cancel.

Method: the running system of the other journeys, gateway to worker; OpenAI's client in threads, raw sockets for clients
that leave. No assertion about seconds: a short answer must come while the long one's is not there.
"""

from __future__ import annotations

import threading

import openai
import pytest

from tests.journey.system import WAIT_S, until
from tests.journey.test_openai import MODEL, health

pytestmark = pytest.mark.model

SHORT = "Name three things a boat needs."
REPORT = {"X-Outrigger-Report": "1"}


def long_text(subject: str) -> str:
    """A prompt of about 570 tokens that shares no beginning with that of another subject."""
    return f"The {subject} was wide and the boat was small. " * 54


@pytest.fixture(scope="module")
def client(system):
    with openai.OpenAI(base_url=system.url, api_key="none", max_retries=0, timeout=4 * WAIT_S) as client:
        until(lambda: health(system)["worker"]["state"] == "ready")
        yield client


def ask(client, text, **fields):
    fields = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0} | fields
    return client.chat.completions.create(extra_headers=REPORT, **({"max_tokens": 4} | fields))


def said(answer) -> str:
    return answer.choices[0].message.content


class Asked:
    """A request in a thread of its own."""

    def __init__(self, client, text, **fields):
        self.answer = None
        self._thread = threading.Thread(target=self._run, args=(client, text), kwargs=fields)
        self._thread.start()

    def _run(self, client, text, **fields):
        self.answer = ask(client, text, **fields)

    def wait(self):
        self._thread.join(4 * WAIT_S)
        assert self.answer is not None
        return self.answer


def reading(system) -> bool:
    return health(system)["requests_running"] == 1


def test_a_short_request_is_answered_during_a_long_read_and_neither_answer_changes(client, system):
    long = Asked(client, long_text("river"))
    until(lambda: reading(system))
    short = ask(client, SHORT)
    assert long.answer is None, "the short answer came first"
    answer = long.wait()
    report = answer.model_extra["outrigger"]
    assert report["tokens_worker"] > 0 and report["fallbacks"] == []
    assert said(answer) == said(ask(client, long_text("river")))
    assert said(short) == said(ask(client, SHORT))


def test_a_client_that_leaves_during_its_read_frees_host_and_worker(client, system):
    leaves = openai.OpenAI(base_url=system.url, api_key="none", max_retries=0, timeout=4 * WAIT_S)
    stream = ask(leaves, long_text("lake"), stream=True)
    until(lambda: reading(system))
    stream.close()
    leaves.close()
    until(lambda: health(system)["requests_running"] == 0)
    report = ask(client, long_text("lake"), max_tokens=1).model_extra["outrigger"]
    assert report["fallbacks"] == [], "the worker was told and goes on"
    assert report["tokens_worker"] > 0 or report["tokens_cache"] > 0


def test_a_queued_client_that_leaves_touches_nobody(client, system):
    long = Asked(client, long_text("sea"))
    until(lambda: reading(system))
    leaves = openai.OpenAI(base_url=system.url, api_key="none", max_retries=0, timeout=4 * WAIT_S)
    queued = ask(leaves, long_text("pond"), stream=True)
    until(lambda: health(system)["requests_waiting"] == 1)
    queued.close()
    leaves.close()
    until(lambda: health(system)["requests_waiting"] == 0)
    answer = long.wait()
    assert answer.choices[0].finish_reason == "length" or said(answer)
    assert answer.model_extra["outrigger"]["fallbacks"] == []
