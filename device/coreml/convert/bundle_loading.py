"""Loads parts of a bundle by the policy of the frozen pages: waits, retries, gives up by cause; keeps all attempts.

`frozen/load_policy.py` decides; this performs, for models without a golden question (a part is judged by the tokens
of the whole). A load that passes its deadline cannot be interrupted: nothing is loaded after it. Called by
bundle_check.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.errors import PageLoadError
from device.coreml.frozen.load_policy import (
    Attempt,
    Cause,
    DeviceFacts,
    GiveUp,
    Load,
    LoadLimits,
    Postpone,
    decide,
)

POSTPONED_S = 30.0
POSTPONED_MAX = 20
"""How often a hot or full device is asked again before the check gives up: ten minutes."""
DEADLINE_S = 600.0
"""A chunk of a 4B model takes minutes to be compiled for the first time."""

T = TypeVar("T")


class PartLoader:
    """`facts` says how the device is; `sleep` and `clock` are the process's own unless a test brings others."""

    def __init__(
        self,
        facts: Callable[[Path], DeviceFacts],
        progress: Callable[[str], None],
        limits: LoadLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.facts, self.progress, self.clock, self.sleep = facts, progress, clock, sleep
        self.limits = limits or LoadLimits(deadline_s=DEADLINE_S)
        self.attempts: list[tuple[str, Attempt]] = []
        self._hung = False

    def load(self, name: str, path: Path, make: Callable[[], T]) -> T:
        """What `make` gives, tried as the policy says. Raises PageLoadError with the first failure's cause."""
        n_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        mine: list[Attempt] = []
        n_postponed = 0
        while True:
            if self._hung and not mine:
                raise PageLoadError(f"{name}: not loaded, an earlier load still hangs", cause=Cause.HANG)
            step = decide(mine, self.facts(path), n_bytes, self.limits, self.clock())
            if isinstance(step, GiveUp):
                raise PageLoadError(f"{name}: {step.text}", cause=step.cause)
            if isinstance(step, Load):
                made = self._attempt(name, make)
                mine.append(self.attempts[-1][1])
                if made is not None:
                    return made
                continue
            n_postponed += isinstance(step, Postpone)
            if isinstance(step, Postpone) and n_postponed > POSTPONED_MAX:
                raise PageLoadError(f"{name}: {step.text}", cause=step.cause)
            wait_s = POSTPONED_S if isinstance(step, Postpone) else step.at_s - self.clock()
            self.progress(f"{name}: waiting {wait_s:.0f} s ({step.cause})")
            self.sleep(max(wait_s, 0.0))

    def _attempt(self, name: str, make: Callable[[], T]) -> T | None:
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((make(), None))
            except Exception as error:  # whatever the device throws is an attempt that failed
                outcome.append((None, error))

        self.progress(f"loading {name}")
        began_s = self.clock()
        thread = threading.Thread(target=run, name="part-load", daemon=True)
        thread.start()
        thread.join(self.limits.deadline_s)
        made, error = outcome[0] if outcome else (None, None)
        cause, text = None, ""
        if not outcome:
            self._hung, cause, text = True, Cause.HANG, f"no answer within {self.limits.deadline_s:g} s"
        elif error is not None:
            known = isinstance(error, PageLoadError) and error.cause in set(Cause)
            cause, text = Cause(error.cause) if known else Cause.OTHER, f"{type(error).__name__}: {error}"
        ended_s = self.clock()
        self.attempts.append((name, Attempt(cause, text, ended_s, ended_s - began_s)))
        return made

    def report(self) -> list[dict[str, Any]]:
        """Every attempt, in order."""
        return [
            {"part": name, "seconds": round(each.seconds, 3), "failed": each.cause, "text": each.text}
            for name, each in self.attempts
        ]
