"""Drills past the host's limit, where old pages are with the worker and in the journal: what is asked and counted.

A case begins with the first tokens of a prompt alone; once the worker has their pages, the whole prompt is asked and
struck. So there are queries from the first new ubatch on. Used by services.bench.drill.run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common.errors import ServiceError
from common.model.spec import ModelSpec
from services.bench.drill.cases import DrillCase, Struck
from services.bench.drill.system import Struckable, Told
from services.bench.drill.trial import Prompt, Subject

N_FIRST, N_PROMPT, N_TOKENS, N_PROMPTS = 1536, 2100, 96, 3
PLACED_S_MAX, QUIET_S, LOOK_S = 60.0, 0.4, 0.05
PUSHED = "outrigger_held_pages_pushed_total"
BY_WORKER, BY_JOURNAL = (f'outrigger_held_groups_total{{where="{where}"}}' for where in ("worker", "journal"))
FELL_BACK = "outrigger_pages_fallback_total{"


class Growth:
    """How far counters of a process grew since they were looked at first, though it may have begun anew meanwhile."""

    def __init__(self) -> None:
        self.by_series: dict[str, float] = {}
        self._seen: dict[str, float] | None = None

    def look(self, now: dict[str, float]) -> None:
        """Take in what it says now; nothing, when it is not there."""
        for series, value in now.items():
            before = value if self._seen is None else self._seen.get(series, 0.0)
            grown = value - before if value >= before else value
            self.by_series[series] = self.by_series.get(series, 0.0) + grown
        self._seen = now or {}


class PastSubject(Subject):
    """A system whose host's limit is lower than the prompts are long."""

    def __init__(self, system: Struckable, next_prompt: Callable[[], Prompt], frozen_s: float) -> None:
        super().__init__(system, next_prompt, frozen_s)
        kinds = set(ModelSpec.read(system.settings.host.model).kinds)
        self._resumes = kinds <= {"attention", "recurrent"}
        """Rows of other layers are not in the journal: such a conversation is read again after a restart."""
        self._case, self._answer_only = Growth(), Growth()
        self._last: Prompt | None = None

    def run(self, case: DrillCase) -> Struck:
        """See Subject."""
        self._case = Growth()
        self._look(self._case)
        return super().run(case)

    def _look(self, growth: Growth) -> None:
        growth.look(self.system.metrics("mac"))

    def _begin(self) -> Prompt:
        """The next prompt; of its first tokens the worker has the old pages."""
        prompt = self._last = self._next()
        before = self.system.value("bridge", PUSHED)
        self.system.ask(prompt.token_ids[: prompt.n_first], 1)
        self._wait_pushed(before)
        self._answer_only = Growth()
        self._look(self._answer_only)
        return prompt

    def _wait_pushed(self, before: float) -> None:
        """Until the worker was given pages, and no more come. Raises ServiceError."""
        until_s = time.monotonic() + PLACED_S_MAX
        seen, since_s = before, time.monotonic()
        while seen <= before or time.monotonic() - since_s < QUIET_S:
            now = self.system.value("bridge", PUSHED)
            if now != seen:
                seen, since_s = now, time.monotonic()
            if time.monotonic() > until_s:
                raise ServiceError(f"for {PLACED_S_MAX:.0f} s the worker was given no page, or ever more")
            time.sleep(LOOK_S)

    def _why_no_part(self, told: Told) -> str:
        self._look(self._answer_only)
        return "" if self._answer_only.by_series.get(BY_WORKER) else "it attended no old page"

    def _answer(self, struck: Struck, prompt: Prompt, strike: Callable[[], None]) -> None:
        def looked() -> None:  # what a process counted is gone with it
            self._look(self._case)
            strike()

        super()._answer(struck, prompt, looked)

    def _answered(self, struck: Struck, told: Told) -> None:
        self._look(self._answer_only)
        grown = self._answer_only.by_series
        struck.fallbacks = tuple(
            series.split('"')[1] for series, n in grown.items() if series.startswith(FELL_BACK) and n
        )

    def _begin_again(self, struck: Struck) -> Prompt:
        """After a mac process was killed, the same prompt: the journal has its pages."""
        if struck.case.kill == "mac" and self._last is not None:
            return self._last
        return self._begin()

    def _followed(self, struck: Struck, prompt: Prompt, told: Told) -> None:
        super()._followed(struck, prompt, told)
        limit = self.system.settings.host.kv_host_tokens
        if struck.case.kill == "mac" and self._resumes and told.report.get("tokens_cache", 0) < limit:
            struck.problems.append("the conversation was read again, though the journal has it")

    def _settled(self, struck: Struck) -> None:
        self._look(self._case)
        struck.remote = int(self._case.by_series.get(BY_WORKER, 0.0))
