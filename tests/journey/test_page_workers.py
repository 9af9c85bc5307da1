"""Aim: a conversation whose old pages two workers hold answers as if all of it were in the host's memory, though one of
them is killed in the middle of an answer; the other goes on, and the one that is started again has its share again.

Method: `outrigger run` twice over a small hybrid with a limit of 1,024 tokens: alone, keeping everything, and with two
page workers. OpenAI's client streams the same turns; every token is compared with its log-probability.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from urllib.parse import urlsplit

import pytest

from common.wire.messages import ProcessStatus
from services.bench.scrape import scrape
from services.launch.inquiry import ask_launch
from tests.journey.system import System, until
from tests.journey.test_past_the_limit import BREACH, EQUAL, LIMIT, PUSHED, talking

pytestmark = pytest.mark.model

N_TURNS = 5
STRUCK = 3
"""The turn in which a worker is killed."""
WORKERS = ("1", "2")


def process(system: System, name: str) -> ProcessStatus:
    (found,) = [each for each in ask_launch(system.run_dir).processes if each.process == name]
    return found


def by_worker(system: System, name: str, series: str) -> list[float]:
    """A series of a process, of each worker."""
    samples = scrape(metrics_port(system, name))
    return [samples[f'outrigger_{series}{{worker="{worker}"}}'] for worker in WORKERS]


def pushed(system: System, name: str) -> float:
    """Pages that a bridge gave its worker."""
    return scrape(metrics_port(system, name))[PUSHED]


def metrics_port(system: System, name: str) -> int:
    return urlsplit(process(system, name).listens["metrics"]).port or 0


def test_one_of_two_page_workers_killed_in_the_middle_of_an_answer(smollm2):
    """smollm2: the tiny hybrid takes its tokenizer from the embedded model."""
    with talking("--no-worker", OUTRIGGER_HOLD="off") as talk:
        right = [talk.turn(number) for number in range(N_TURNS)]
        assert talk.n_prompt > 2.5 * LIMIT

    with talking("--no-worker", "--page-workers", "2", "--worker-threads", "1") as talk:
        groups = partial(by_worker, talk.system, "broker", "worker_groups")
        attended = partial(by_worker, talk.system, "mac", "worker_attended_groups_total")
        found = [talk.turn(number) for number in range(STRUCK)]
        until(lambda: min(groups()) > 0)
        before, victim = attended(), process(talk.system, "worker-2").pid
        found.append(talk.turn(STRUCK, lambda: os.kill(victim, signal.SIGKILL)))
        between = attended()
        assert between[0] > before[0], "the other one went on"
        assert talk.groups("journal") > 0, "nobody had to stand in for the killed one"
        n_pushed = pushed(talk.system, "bridge-2")
        until(lambda: process(talk.system, "worker-2").restarts == 1)
        until(lambda: pushed(talk.system, "bridge-2") > n_pushed and min(groups()) > 0)
        found.append(talk.turn(STRUCK + 1))
        assert min(now - then for now, then in zip(attended(), between, strict=True)) > 0, "both attend again"
        assert talk.value("mac", EQUAL) > 0 == talk.value("mac", BREACH)
    assert found == right
    assert sum(map(len, found)) > 250, "tokens were compared"
