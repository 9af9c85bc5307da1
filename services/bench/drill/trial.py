"""One case of a drill: strike in the middle of an answer, compare, wait until all is whole again, look for leaks.

Used by services.bench.drill.run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

from common.errors import OutriggerError, ServiceError
from services.bench.drill.cases import DrillCase, Struck, judge
from services.bench.drill.system import Struckable, Told
from services.bench.faults.footprint import Footprint, leaks
from services.launch.vigil import EARLY_S

AGAIN_S_MAX = 90.0
SETTLE_S = 5.0
WARM_UP = 3
"""Undisturbed answers before the first fault: what processes hold then is what they may hold later."""
KILLED_WORDS = ("send", "again")
"""What an error of a killed process must say: that the request can be sent again."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and those of the right answer."""

    token_ids: list[int]
    right: tuple[int, ...]
    n_first: int = 0
    """So many of its tokens are asked by themselves before; 0: all at once."""


class Subject:
    """A running system, with what it holds when it is well and how long an answer takes then."""

    def __init__(self, system: Struckable, next_prompt: Callable[[], Prompt], frozen_s: float) -> None:
        self.system, self._next, self._frozen_s = system, next_prompt, frozen_s
        self.usual_s = 0.0
        self._before: dict[str, Footprint] = {}
        self._pids: dict[str, int] = {}
        self._young: set[str] = set()
        """Processes that were looked at once only: not everything they connect to may be there yet."""

    def prepare(self) -> None:
        """Undisturbed answers. Raises ServiceError when the worker takes no part or a token differs."""
        took = []
        for _ in range(WARM_UP):
            self.system.wait_whole(AGAIN_S_MAX)
            prompt = self._begin()
            told = self._ask(prompt)
            if told.token_ids != prompt.right:
                raise ServiceError("an undisturbed answer already differs from that of the host alone")
            if why := self._why_no_part(told):
                raise ServiceError(f"the worker took no part: {why}")
            took.append(told.seconds)
            self._remember()
        self.usual_s = median(took)

    def run(self, case: DrillCase) -> Struck:
        """Strike once. What is wrong stands in the result's `problems`."""
        struck = Struck(case)
        self._wait_old_enough(case.kill)
        killed = {case.kill: self.system.pids()[case.kill]} if case.kill else None
        if case.script:
            self._strike_by_script(struck, case.script.format(frozen=f"{self._frozen_s:g}"))
        else:
            self._strike_by_hand(struck, killed)
        ended_s = time.monotonic()
        try:
            self._until_whole(struck, killed)
        except OutriggerError as error:
            struck.problems.append(str(error))
        struck.again_s = time.monotonic() - ended_s
        struck.leaks = self._leaks()
        self._settled(struck)
        struck.problems += judge(struck)
        self._remember()
        return struck

    # --- what another kind of subject does otherwise

    def _begin(self) -> Prompt:
        """The next prompt, with everything ready for it to be asked."""
        return self._next()

    def _why_no_part(self, told: Told) -> str:
        """Why the worker took no part in an answer; empty when it did."""
        return "" if told.report.get("tokens_worker") else str(told.report.get("bypass_reason"))

    def _answered(self, struck: Struck, told: Told) -> None:
        """Note what the worker's loss did to an answer that went on."""
        struck.fallbacks = tuple(told.report.get("fallbacks", ()))

    def _begin_again(self, struck: Struck) -> Prompt:
        """The prompt that is asked once all is whole again."""
        return self._begin()

    def _followed(self, struck: Struck, prompt: Prompt, told: Told) -> None:
        """Note the answer after the struck one."""
        struck.compare(prompt.right, told.token_ids)

    def _settled(self, struck: Struck) -> None:
        """Note what is known once all is over."""

    # --- strokes

    def _strike_by_script(self, struck: Struck, script: str) -> None:
        end = self.system.far_end()
        if end is None:
            raise ServiceError("the worker's control channel takes no faults any more")
        n_before, prompt = 0, self._begin()

        def arm() -> None:
            nonlocal n_before
            n_before = end.arm(script)

        try:
            if struck.case.while_reading:
                arm()
                self._answer(struck, prompt, lambda: None)
            else:
                self._answer(struck, prompt, arm)
            end.wait_spent(SETTLE_S)
            struck.happened = bool(end.fired(n_before))
            if not struck.happened:
                end.ask("disarm")
        finally:
            end.close()

    def _strike_by_hand(self, struck: Struck, killed: dict[str, int] | None) -> None:
        """A kill, or with None an answer that nothing is done to."""
        prompt = self._begin()

        def strike() -> None:
            struck.happened = True
            for pid in (killed or {}).values():
                os.kill(pid, signal.SIGKILL)

        self._answer(struck, prompt, strike)

    def _answer(self, struck: Struck, prompt: Prompt, strike: Callable[[], None]) -> None:
        try:
            told = self.system.ask(
                prompt.token_ids, len(prompt.right), strike, while_reading=struck.case.while_reading
            )
        except OutriggerError as error:
            struck.error = str(error)
            said = struck.error.lower()
            struck.right_error = isinstance(error, ServiceError) and all(w in said for w in KILLED_WORDS)
            return
        struck.compare(prompt.right, told.token_ids)
        self._answered(struck, told)
        struck.lost_s = told.seconds - self.usual_s

    # --- afterwards

    def _until_whole(self, struck: Struck, killed: dict[str, int] | None) -> None:
        """Until everything is ready, and an answer is right again."""
        until_s = time.monotonic() + AGAIN_S_MAX
        while True:
            self.system.wait_whole(max(0.0, until_s - time.monotonic()), killed)
            with suppress(ServiceError):  # a process that ended a moment ago still counted as ready
                prompt = self._begin_again(struck)
                self._followed(struck, prompt, self._ask(prompt))
                return

    def _leaks(self) -> list[str]:
        """Of the processes that lived through it; the others hold nothing from before."""
        same = self.system.pids()
        before = {
            name: held
            for name, held in self._before.items()
            if name not in self._young and (name == "launch" or same.get(name) == self._pids.get(name))
        }
        found = leaks(before, self.system.footprints, SETTLE_S)
        until_s = time.monotonic() + SETTLE_S
        while (gauges := self.system.not_at_rest()) and time.monotonic() < until_s:
            time.sleep(0.2)
        return found + gauges

    def _remember(self) -> None:
        """What processes hold, of those that were not looked at twice before."""
        pids = self.system.pids()
        now = self.system.footprints()
        same = {name for name in self._before if name == "launch" or pids.get(name) == self._pids.get(name)}
        kept = {name: self._before[name] for name in same - self._young}
        self._before, self._pids, self._young = now | kept, pids, now.keys() - same

    def _ask(self, prompt: Prompt) -> Told:
        return self.system.ask(prompt.token_ids, len(prompt.right))

    def _wait_old_enough(self, name: str) -> None:
        while name and self.system.system.uptimes_s().get(name, 0.0) < EARLY_S:
            time.sleep(0.1)
