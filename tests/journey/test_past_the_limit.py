"""Aim: a conversation three times as long as the host's limit answers as if all of it were in the host's memory, though
the worker, which holds its old pages, and then the broker are killed in the middle of answers.
Method: `outrigger run` twice over a small hybrid with a limit of 1,024 tokens: alone, keeping everything, and with
broker, bridge and worker. OpenAI's client streams the same turns; every token is compared with its log-probability."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import openai
import pytest

from common.model.synthetic import ensure_preset
from services.bench.processes import free_port
from services.bench.scrape import scrape
from tests.journey.system import System, running_system, until

pytestmark = pytest.mark.model

LIMIT, N_CTX = 1024, 4096
SHAPE = {
    "OUTRIGGER_KV_HOST_TOKENS": str(LIMIT),
    "OUTRIGGER_PAGE_TOKENS": "64",
    "OUTRIGGER_GROUP_PAGES": "2",
    "OUTRIGGER_SHADOW_EVERY": "50",
}
SENTENCES = ("The sail was set and the wind was fair. ", "A gull sat on the mast and looked at the sea. ")
N_ANSWER = 64
KILLED_AT = 8
"""Tokens of an answer that are there when a process is killed."""
PLACED, PUSHED = 'outrigger_held_pages{where="worker"}', "outrigger_held_pages_pushed_total"
FELL_BACK = 'outrigger_pages_fallback_total{cause="down"}'
EQUAL, BREACH = (f'outrigger_shadow_checks_total{{outcome="{each}"}}' for each in ("equal", "breach"))


@dataclass
class Talk:
    """A conversation with one system."""

    system: System
    client: openai.OpenAI
    model: str
    ports: dict[str, int]
    messages: list[dict[str, str]] = field(default_factory=list)
    n_prompt: int = 0
    n_pushed: float = 0.0

    def turn(self, number: int, strike: Callable[[], None] = lambda: None) -> list[tuple[str, float]]:
        """(token, its log-probability) of the streamed answer; `strike` is called once in its middle."""
        text = f"{number}. " + SENTENCES[number % 2] * 52
        self.messages.append({"role": "user", "content": text})
        told: list[tuple[str, float]] = []
        struck = False
        with self.client.chat.completions.create(
            model=self.model, messages=self.messages, temperature=0, max_tokens=N_ANSWER, logprobs=True,
            stream=True, stream_options={"include_usage": True},
        ) as stream:  # fmt: skip
            for chunk in stream:
                if chunk.usage:
                    self.n_prompt = chunk.usage.prompt_tokens
                for choice in chunk.choices:
                    if choice.logprobs:
                        told += [(each.token, each.logprob) for each in choice.logprobs.content]
                if len(told) >= KILLED_AT and not struck:
                    struck = True
                    strike()
        self.messages.append({"role": "assistant", "content": "".join(token for token, _ in told)})
        return told

    def killing(self, process: str) -> Callable[[], None]:
        """What kills a process that runs now; it is started again by itself."""
        pid = self.system.pid_of(process)

        def kill() -> None:
            os.kill(pid, signal.SIGKILL)
            self.n_pushed = self.value("bridge", PUSHED)

        return kill

    def value(self, process: str, series: str) -> float:
        """Of a series, 0 while the process is not there."""
        try:
            return scrape(self.ports[process]).get(series, 0.0)
        except OSError:
            return 0.0

    def groups(self, where: str) -> float:
        """Groups of pages attended so far, of all layers, by a worker or from the journal."""
        return self.value("mac", f'outrigger_held_groups_total{{where="{where}"}}')

    def wait_placed(self) -> None:
        """Until a worker was given pages after the last kill."""
        until(lambda: self.value("broker", PLACED) > 0 and self.value("bridge", PUSHED) > self.n_pushed)


@contextmanager
def talking(*flags: str, **environ: str) -> Iterator[Talk]:
    """A conversation with a running system."""
    ports = {process: free_port() for process in ("mac", "broker", "bridge")}
    environ |= {f"OUTRIGGER_{process.upper()}_METRICS_PORT": str(port) for process, port in ports.items()}
    model = ensure_preset("tiny")
    base = ("--model", str(model), "--n-ctx", str(N_CTX), "--threads", "1")
    with (
        running_system(*base, *flags, **SHAPE, **environ) as system,
        openai.OpenAI(base_url=system.url, api_key="none", max_retries=0, timeout=90) as client,
    ):
        yield Talk(system, client, model.stem, ports)


def test_the_worker_then_the_broker_killed_in_the_middle_of_answers(smollm2):
    """smollm2: the tiny hybrid takes its tokenizer from the embedded model."""
    n_turns = 6
    with talking("--no-worker", OUTRIGGER_HOLD="off") as talk:
        right = [talk.turn(number) for number in range(n_turns)]
        assert talk.n_prompt > 3 * LIMIT and talk.groups("worker") == talk.groups("journal") == 0

    with talking("--split-layer", "4", "--worker-threads", "1") as talk:
        found = [talk.turn(number) for number in range(3)]
        assert talk.n_prompt > LIMIT
        talk.wait_placed()
        found.append(talk.turn(3, talk.killing("worker")))
        assert talk.groups("worker") > 0, "the worker attended nothing"
        assert talk.value("mac", FELL_BACK) == 1, "nobody had to stand in for it"
        talk.wait_placed()
        found.append(talk.turn(4, talk.killing("broker")))
        talk.wait_placed()
        by_worker = talk.groups("worker")
        found.append(talk.turn(5))
        assert talk.groups("worker") > by_worker, "the worker that was started again attended nothing"
        assert talk.value("mac", EQUAL) > 0 == talk.value("mac", BREACH)
    assert found == right
    assert sum(map(len, found)) > 300, "tokens were compared"
