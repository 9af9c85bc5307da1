"""What a drill does to a running system, and what must come of it. Pure; used by services.bench.drill.trial."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Expected = Literal["goes on", "ends"]
"""goes on: the answer is complete and its tokens are right. ends: it ends with an error that says why."""


@dataclass(frozen=True)
class DrillCase:
    """One thing that goes wrong in the middle of an answer: a script of the emulator, or a process that is killed."""

    name: str
    script: str = ""
    """{frozen} is how many seconds a frozen worker stays so."""
    kill: str = ""
    while_reading: bool = True
    """Else while the answer is written."""
    expected: Expected = "goes on"
    loses_worker: bool = False
    """The read's report must tell that the worker was lost."""
    past: bool = False
    """Past the host's limit: old pages are with the worker and in the journal."""
    loses_pages: bool = False
    """The mac process must have counted that the journal stood in for the worker's pages."""
    slow_link: bool = False
    """Nothing is struck; the whole answer goes over a slow link."""


CASES = (
    DrillCase("cable cut mid-read", "cut in chunk 2", loses_worker=True),
    DrillCase("cable cut mid-decode", "cut now", while_reading=False),
    DrillCase("worker frozen", "freeze {frozen} during chunk 2", loses_worker=True),
    DrillCase("corrupted frame", "flip in chunk 2", loses_worker=True),
    DrillCase("worker out of memory", "out-of-memory during chunk 2", loses_worker=True),
    DrillCase("worker suspended", "suspend 2 during chunk 2", loses_worker=True),
    DrillCase("worker killed", kill="worker"),
    DrillCase("bridge killed", kill="bridge"),
    DrillCase("broker killed", kill="broker"),
    DrillCase("mac killed", kill="mac", expected="ends"),
    DrillCase("gateway killed", kill="gateway", expected="ends"),
    DrillCase("slow link", slow_link=True),
)
"""Kills come late: a process that lived for ten seconds is started again at once, one that did not is not."""

PAST_CASES = tuple(
    replace(case, name=f"past the limit: {case.name}", past=True)
    for case in (
        DrillCase("cable cut mid-read", "cut in query 2", loses_pages=True),
        DrillCase("cable cut mid-decode", "cut in query 2", while_reading=False, loses_pages=True),
        DrillCase("worker frozen", "freeze {frozen} during query 2", while_reading=False, loses_pages=True),
        DrillCase("corrupted query", "flip in query 2", loses_pages=True),
        DrillCase("corrupted answer", "flip answering query 2", while_reading=False, loses_pages=True),
        DrillCase("worker out of memory", "out-of-memory during append 1"),
        DrillCase("worker killed", kill="worker", while_reading=False, loses_pages=True),
        DrillCase("bridge killed", kill="bridge", while_reading=False, loses_pages=True),
        DrillCase("broker killed", kill="broker", while_reading=False),
        DrillCase("mac killed", kill="mac", while_reading=False, expected="ends"),
        DrillCase("slow link", slow_link=True),
    )
)
"""The same conversation is asked twice in each: its beginning, so that pages go to the worker, then all of it."""


@dataclass
class Struck:
    """What became of one case. `problems` are sentences; empty when all is as it must be."""

    case: DrillCase
    happened: bool = False
    error: str = ""
    said: str = ""
    """What came of it, when it is not an answer's end."""
    right_error: bool = False
    """The error is one of ours that says what happened."""
    n_compared: int = 0
    n_equal: int = 0
    fallbacks: tuple[str, ...] = ()
    """Causes for which work of the worker was done here instead: of a read, or of pages past the limit."""
    remote: int = 0
    """Groups of old pages that the worker attended for the struck answer, and the one after it."""
    lost_s: float = 0.0
    """Seconds that the struck answer took longer than an undisturbed one; 0 when it ended."""
    again_s: float = 0.0
    """Seconds from the end of the struck answer until everything stood ready and answered rightly."""
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def compare(self, right: Sequence[int], found: Sequence[int]) -> None:
        """Count token ids that agree."""
        self.n_compared += max(len(right), len(found))
        self.n_equal += sum(a == b for a, b in zip(right, found, strict=False))

    @property
    def outcome(self) -> str:
        """In the words of the table."""
        if self.said:
            return self.said
        if self.error:
            return f"ended: {self.error}"
        if not self.fallbacks:
            return "went on"
        how = "from the journal" if self.case.past else "worker lost"
        return f"went on, {how} ({', '.join(self.fallbacks)})"


def judge(struck: Struck) -> list[str]:
    """What is wrong with an outcome; sentences, empty when nothing is."""
    found = []
    if not struck.happened:
        found.append("it did not happen, so nothing was tried")
    if struck.error and struck.case.expected == "goes on":
        found.append(f"the answer ended: {struck.error}")
    elif struck.case.expected == "ends" and struck.happened and not struck.error:
        found.append("it was killed too late: the answer was complete")
    elif struck.error and not struck.right_error:
        found.append(f"it ended with another error than promised: {struck.error}")
    if struck.n_equal != struck.n_compared:
        found.append(f"{struck.n_equal} of {struck.n_compared} tokens equal")
    if not struck.n_compared:
        found.append("no token was compared")
    if struck.case.loses_worker and struck.happened and not (struck.error or struck.fallbacks):
        found.append("the read does not tell that the worker was lost")
    if struck.case.loses_pages and struck.happened and not (struck.error or struck.fallbacks):
        found.append("nothing tells that the journal stood in for the worker's pages")
    if struck.case.past and not struck.remote:
        found.append("the worker attended no old page, so nothing of it could be lost")
    return found + [f"leaked: {text}" for text in struck.leaks]


def possible(
    cases: Sequence[DrillCase],
    processes: Collection[str],
    takes_faults: bool,
    own_worker: bool,
) -> tuple[list[DrillCase], list[tuple[str, str]]]:
    """(cases that can be tried here, (name, why not) of the others).

    processes: names of those that run and can be killed. takes_faults: the worker is an emulated one. own_worker: it
    was started by the drill, so that its link can be made slow.
    """
    chosen, left_out = [], []
    for case in cases:
        if case.kill and case.kill not in processes:
            left_out.append((case.name, f"no {case.kill} process is started here"))
        elif case.script and not takes_faults:
            left_out.append((case.name, "this worker takes no faults; start it with --emulate loopback"))
        elif case.slow_link and not own_worker:
            left_out.append((case.name, "the link to a worker elsewhere is what it is"))
        else:
            chosen.append(case)
    return chosen, left_out
