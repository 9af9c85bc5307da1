"""`outrigger verify --turns`: an answer that reuses earlier turns is, to the bit, the one that reads everything again.

Real processes. Each request of a chat goes to a host alone, to a host with a worker, and to one that is made to forget
everything before each request. Token ids and their log-probabilities are compared; so is how much a host read again
with how much was new. Called by services.cli.verify.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ServiceError
from common.ggml.vocabulary import Vocabulary
from common.limits import UBATCH_TOKENS
from common.model.spec import ModelSpec
from common.model.split import plan_split
from services.bench.chats import Ids, Roles, Step, scripts
from services.bench.client import Answer
from services.bench.compared import Compared
from services.bench.models import models
from services.bench.report import Report
from services.bench.rig import Rig, Seat
from services.bench.texts import natural_tokens

N_CTX = 4096
SPLIT_TOKENS_MIN = 257
"""So that the worker takes part in ordinary turns."""
IDLE_S_MAX = 60.0
WARM: dict[str, Any] = {"split_tokens_min": SPLIT_TOKENS_MIN}
QUICK_REAL_SCRIPTS = ("edit",)
"""What a quick run does with the model that is not tiny."""
COLD: dict[str, Any] = {"short_ctx": 0, "canonical": "off"}


@dataclass
class TurnTotals(Compared):
    """What was compared: tokens with their log-probabilities, of answers that reused something or could have."""

    reread_tokens_max: int = 0
    """Most tokens read by a request beyond those that were new to the host."""
    tokens_cache: int = 0
    tokens_worker: int = 0

    def compare_answers(self, what: str, cold: Answer, warm: Answer) -> None:
        """Counts the tokens of `cold` that `warm` has, too, with the same log-probability."""
        self.compare(what, *(list(zip(a.token_ids, a.logprobs, strict=True)) for a in (cold, warm)))

    def reread(self, what: str, prompt: Ids, held: Ids, answer: Answer) -> int:
        """How many tokens beyond the new ones were read, when `held` had been read (or run again) before.

        A prompt that is held already still needs its last token.
        """
        report = answer.report
        n_shared = min(shared(prompt, held), len(prompt) - 1)
        n_reread = n_shared - report.tokens_cache
        self.reread_tokens_max = max(self.reread_tokens_max, n_reread)
        self.tokens_cache += report.tokens_cache
        self.tokens_worker += report.tokens_worker
        if n_reread > UBATCH_TOKENS:
            self.problems.append(f"{what}: {n_reread} tokens were read again; at most {UBATCH_TOKENS} may be")
        if report.tokens_cache + report.tokens_host + report.tokens_worker != len(prompt):
            self.problems.append(f"{what}: the report's tokens do not add up to {len(prompt)}")
        return n_reread

    @property
    def passed(self) -> bool:
        took_part = self.compared > 0 and self.tokens_cache > 0 and self.tokens_worker > 0
        return took_part and self.equal == self.compared and not self.problems


class Warm:
    """A seat that keeps what it read, and what it must have at hand."""

    def __init__(self, rig: Rig, seat: Seat) -> None:
        self.rig, self.seat = rig, seat
        self.held: Ids = np.empty(0, np.int32)

    def ask(self, step: Step, cold: Answer, what: str, end_id: int, totals: TurnTotals) -> dict[str, object]:
        """The same request here: compare it, wait for idle time if the step says so. Returns what to report."""
        answer = ask(self.seat, step, end_id)
        name = f"{what}, {self.seat.name}"
        totals.compare_answers(name, cold, answer)
        n_reread = totals.reread(name, step.prompt, self.held, answer)
        self.held = step.prompt
        if step.waits:
            self._wait_idle()
            self.held = np.concatenate([step.prompt, np.array(answer.token_ids, np.int32)])
        report = answer.report
        return {
            "what": name,
            "n_prompt": len(step.prompt),
            "reread": n_reread,
            "tokens_cache": report.tokens_cache,
            "tokens_worker": report.tokens_worker,
            "equal": answer.token_ids == cold.token_ids and answer.logprobs == cold.logprobs,
        }

    def _wait_idle(self) -> None:
        until_s = time.monotonic() + IDLE_S_MAX
        while self.rig.status(self.seat).tokens_provisional:
            if time.monotonic() > until_s:
                raise ServiceError(
                    f"{self.seat.name} had {IDLE_S_MAX:g} s and did not make its answer canonical"
                )
            time.sleep(0.02)


def verify_turns(report: Report) -> TurnTotals:
    """Run everything; the caller decides what a difference means. Raises ServiceError when processes fail."""
    totals = TurnTotals()
    for label, path in models(report.quick):
        _verify_model(label, path, report, totals)
    report.table(
        "chats, warm against cold",
        ("", "count"),
        [
            ("tokens and log-probabilities compared", totals.compared),
            ("equal", totals.equal),
            ("prompt tokens from cache", totals.tokens_cache),
            ("prompt tokens the worker ran", totals.tokens_worker),
            ("most tokens read again", totals.reread_tokens_max),
        ],
    )
    return totals


def _verify_model(label: str, path: Path, report: Report, totals: TurnTotals) -> None:
    roles, end_id = _template(path)
    places = count(0)
    with Rig(path, n_ctx=N_CTX, **WARM) as rig, Rig(path, n_ctx=N_CTX, **COLD) as cold_rig:
        cold = cold_rig.seat_alone()
        warm = [
            Warm(rig, rig.seat_alone()),
            Warm(rig, rig.seat_split(plan_split(ModelSpec.read(path), None).layer)),
        ]
        cold_rig.wait_ready(cold)
        for each in warm:
            rig.wait_ready(each.seat)
        rig.tell_what_runs(report, label)

        def text(n: int) -> Ids:
            return natural_tokens(path, n, skip=700 * next(places))

        for name, script in scripts(text, roles, end_id).items():
            if report.quick and label == "smollm2" and name not in QUICK_REAL_SCRIPTS:
                continue
            step = next(script)
            for number in count(1):
                what = f"{label} {name} {number}"
                right = _ask_cold(cold, step, end_id)
                rows = [each.ask(step, right, what, end_id, totals) for each in warm]
                for row in rows:
                    report.row(**row)
                told = ", ".join(f"{row['tokens_cache']} from cache" for row in rows)
                state = "equal" if all(row["equal"] for row in rows) else "DIFFERENT"
                report.progress(f"{what}: {len(step.prompt)} tokens, {told}: {state}")
                try:
                    step = script.send(right.token_ids)
                except StopIteration:
                    break


def ask(seat: Seat, step: Step, end_id: int) -> Answer:
    """One greedy request with log-probabilities, that never ends a turn before its length."""
    return seat.client.generate(step.prompt, step.n_answer, turn_end_id=end_id, top_logprobs=0)


def _ask_cold(seat: Seat, step: Step, end_id: int) -> Answer:
    """As ask, of a host that has just read something else."""
    other = (step.prompt[:2] + 1) % 1000
    seat.client.generate(other, 1)
    answer = ask(seat, step, end_id)
    if answer.report.tokens_cache:
        raise ServiceError(f"a cold read took {answer.report.tokens_cache} tokens from cache")
    return answer


def shared(a: Ids, b: Ids) -> int:
    """How many leading token ids two texts share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def _template(path: Path) -> tuple[Roles, int]:
    """Role names as token ids, and the token that ends a turn."""
    vocabulary = Vocabulary.load(path)
    try:
        roles = {
            role: np.array(vocabulary.tokenize(f"{role}\n", add_special=False, parse_special=False), np.int32)
            for role in ("system", "user", "assistant", "tool")
        }
        return roles, max(vocabulary.end_ids)
    finally:
        vocabulary.close()
