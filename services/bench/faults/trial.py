"""One fault during one answer: did it happen, did the answer go on, are its tokens the right ones, what did it cost.

A `Subject` is one model on running processes: a host alone, whose answers are the right ones, and a host with an
emulated worker. After each fault the worker must come back and be used again, with the right tokens. Every read is a
cold one (prompts.py). Used by services.bench.verify_faults.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from common.limits import CHUNK_WINDOW
from common.wire.deadlines import AckClock
from services.bench.client import Answer
from services.bench.compared import n_alike
from services.bench.faults.cases import (
    BEFORE,
    DURING_SYNC,
    MID_DECODE,
    Case,
)
from services.bench.faults.far_end import FarEnd
from services.bench.faults.prompts import ColdPrompts, Tokens
from services.bench.report import NotMeasuredError
from services.bench.rig import Rig, Seat

ATTEMPTS = 3
"""A read on a busy machine may take its chunks back before the fault's turn comes; then it is tried again."""
DECODED_BEFORE_FAULT = 3
SHORT_TURN_TOKENS = 300
NOW_S_MAX = 5.0
REFUSED_S_MAX = 10.0
REFUSED = '"event": "link changed", "state": "refused"'
USED_AGAIN_S_MAX = 120.0
SILENCE_S_MAX = 120.0
"""A stream that says nothing for so long did not go on."""


@dataclass
class Trial:
    """What came of one case. `problems` are sentences; empty when all is as it must be."""

    case: Case
    n_compared: int = 0
    n_equal: int = 0
    lost_s: float = 0.0
    """Seconds the answer took longer than an undisturbed one."""
    away_s: float = 0.0
    """Seconds from the answer's end until the worker was used again."""
    tokens_worker: int = 0
    tokens_returned: int = 0
    fallbacks: tuple[str, ...] = ()
    fired: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def compare(self, what: str, right: Answer, found: Answer) -> None:
        """Count token ids that agree; every other one is a problem."""
        n_equal, n_total = n_alike(right.token_ids, found.token_ids)
        self.n_compared += n_total
        self.n_equal += n_equal
        self.tokens_worker += found.report.tokens_worker
        if n_equal != n_total:
            self.problems.append(f"{what}: {n_equal} of {n_total} tokens equal")

    @property
    def outcome(self) -> str:
        """What the struck answer's report says became of the worker's work."""
        if self.fallbacks:
            return f"lost: {', '.join(self.fallbacks)}"
        return f"{self.tokens_returned} tokens taken back" if self.tokens_returned else "went on"


class Subject:
    """One model under test. `prepare` before the first `run`."""

    def __init__(self, rig: Rig, prompts: ColdPrompts, split: Seat, *, n_tokens: int) -> None:
        """n_tokens: of each answer."""
        self.rig, self.split = rig, split
        split.client.answer_s_max = SILENCE_S_MAX
        self.far_end = FarEnd(rig.settings(split).worker.control_port)
        self.n_chunks = 0
        self.freeze_long_s = 0.0
        self._prompts, self._n_tokens = prompts, n_tokens
        self._read_s = self._turn_s = 0.0

    def prepare(self) -> None:
        """Undisturbed answers: how many chunks a read sends, how long it takes. Raises NotMeasuredError."""
        answers = [self.split.client.generate(self._prompts.next(), self._n_tokens) for _ in range(3)]
        self.n_chunks = max(sum(stage.worker_s > 0 for stage in each.report.stages) for each in answers)
        if self.n_chunks < 2:
            raise NotMeasuredError(f"the worker ran {self.n_chunks} chunks of a read; faults need two")
        worker_s = max(stage.worker_s for each in answers for stage in each.report.stages)
        answer_s_min = self.rig.settings(self.split).bridge.answer_s_min
        self.freeze_long_s = 2 + max(answer_s_min, AckClock.factor * CHUNK_WINDOW * worker_s)
        self._read_s = median(each.total_s for each in answers)
        _prompt, later = self._later_turn(lambda: None)
        self._turn_s = later.total_s

    def run(self, case: Case) -> Trial:
        """One case, tried again while its fault does not happen."""
        for attempt in range(1, ATTEMPTS + 1):
            trial, n_refused = Trial(case), self._n_refused
            script = case.script(self.n_chunks, self.freeze_long_s)
            self.rig.wait_ready(self.split)
            prompt, answer = self._answer_with(case, trial, script)
            n_expected = script.count(";") + 1
            if len(trial.fired) >= n_expected or attempt == ATTEMPTS:
                break
            self.far_end.ask("disarm")
            self._until_used_again(trial)
        if len(trial.fired) < n_expected:
            trial.problems.append(f"the fault did not happen in {ATTEMPTS} attempts: {script}")
            self.far_end.ask("disarm")
        self._judge(case, trial, prompt, answer, n_refused)
        self._until_used_again(trial)
        return trial

    def close(self) -> None:
        self.far_end.close()

    # --- the answer that is struck

    def _answer_with(self, case: Case, trial: Trial, script: str) -> tuple[Tokens, Answer]:
        n_before = 0

        def arm() -> None:
            nonlocal n_before
            n_before = self.far_end.arm(script)

        usual_s = self._read_s
        if case.moment is DURING_SYNC:
            usual_s = self._turn_s
            prompt, answer = self._later_turn(arm)
        else:
            prompt = self._prompts.next()
            if case.moment is not MID_DECODE:
                arm()
            if case.moment is BEFORE:
                self.far_end.wait_spent(NOW_S_MAX)
            started_s = time.monotonic()
            request_id = self.split.client.start(prompt, self._n_tokens)
            strike = arm if case.moment is MID_DECODE else lambda: None
            answer = self.split.client.finish(request_id, started_s, _at(DECODED_BEFORE_FAULT, strike))
        if case.moment is MID_DECODE:
            self.far_end.wait_spent(NOW_S_MAX)
        trial.fired = self.far_end.fired(n_before)
        trial.lost_s = answer.total_s - usual_s
        return prompt, answer

    def _later_turn(self, arm: Callable[[], None]) -> tuple[Tokens, Answer]:
        """A chat whose second turn is too short for the worker: the mirror then lacks rows, and is given them by SYNC.

        That happens in idle time or in the third turn, which is returned.
        """
        turn = self._prompts.next()
        for n_more, act in ((SHORT_TURN_TOKENS, arm), (self._prompts.n_prompt, lambda: None)):
            answer = self.split.client.generate(turn, self._n_tokens)
            act()
            more = self._prompts.next()[:n_more]
            turn = np.concatenate([turn, np.array(answer.token_ids, np.int32), more])
        return turn, self.split.client.generate(turn, self._n_tokens)

    # --- what is found

    def _judge(self, case: Case, trial: Trial, prompt: Tokens, answer: Answer, n_refused: int) -> None:
        read = answer.report
        trial.fallbacks, trial.tokens_returned = read.fallbacks, read.tokens_returned
        trial.compare("the answer", self._prompts.right(prompt), answer)
        if case.must_lose_worker and not (read.fallbacks or read.tokens_returned):
            trial.problems.append(f"nobody noticed: the worker ran {read.tokens_worker} tokens")
        if case.moment is not DURING_SYNC and read.tokens_cache:
            trial.problems.append(f"not a cold read: {read.tokens_cache} tokens were reused")
        if case.kind.refuses and not self._is_refused(n_refused):
            trial.problems.append("the next greeting was not refused")

    @property
    def _n_refused(self) -> int:
        """Refused greetings that the host was told of so far. (Its state tells it too, but not for long.)"""
        return self.rig.processes.n_said(f"{self.split.name}-mac", REFUSED)

    def _is_refused(self, n_before: int) -> bool:
        """Waits a while for one more refused greeting."""
        until_s = time.monotonic() + REFUSED_S_MAX
        while self._n_refused <= n_before:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.05)
        return True

    def _until_used_again(self, trial: Trial) -> None:
        """Answers until the worker takes part in one; all of them must be right."""
        since_s = time.monotonic()
        while True:
            self.rig.wait_ready(self.split)
            prompt = self._prompts.next()
            started_s = time.monotonic()
            found = self.split.client.generate(prompt, self._n_tokens)
            trial.compare("an answer afterwards", self._prompts.right(prompt), found)
            if found.report.tokens_worker:
                trial.away_s = started_s - since_s
                return
            if time.monotonic() - since_s > USED_AGAIN_S_MAX:
                reason = found.report.bypass_reason or ", ".join(found.report.fallbacks)
                trial.problems.append(f"the worker was not used again: {reason}")
                return


def _at(index: int, act: Callable[[], None]) -> Callable[[int, int], None]:
    """A callback of tokens that acts at one of them."""

    def on_token(at: int, _token_id: int) -> None:
        if at == index:
            act()

    return on_token
