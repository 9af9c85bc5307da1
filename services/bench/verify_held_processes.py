"""`outrigger verify --held`, its last part: the whole system past its limit, with real processes struck in the middle.

`outrigger run` with broker, two bridges and two real workers that hold pages, against one host process that keeps every
page (the same settings, `hold = off`), token for token. One conversation of token ids that grows: each turn is struck
once, while it is read or while it is answered. Then the processes must be there again, pages on workers, and the next
turn right.
Called by verify_held.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from common.errors import OutriggerError, ServiceError
from common.ggml.vocabulary import Vocabulary
from services.bench.client import HostClient
from services.bench.compared import Compared
from services.bench.faults.system import RunningSystem
from services.bench.report import NotMeasuredError, Report
from services.bench.rig import Rig
from services.bench.texts import natural_tokens
from services.client import OutriggerClient, PieceWritten, ReadingPrompt

N_CTX = 8192
SHAPE: dict[str, object] = {
    "n_ctx": N_CTX,
    "threads": 1,
    "kv_host_tokens": 1024,
    "page_tokens": 64,
    "group_pages": 2,
    "shadow_every": 20,
}
N_BEGIN, N_TURN, N_ANSWER = 1700, 300, 32
"""Tokens of the first prompt, of what each turn adds, and of an answer."""
FROZEN_S = 3.0
WHOLE_S_MAX = 90.0
STRIKES_ANSWER_AT = 8
"""Tokens of an answer that are there when a process is struck."""
TEXT_TOKENS = 90_000

Moment = Literal["reading", "answering"]
MOMENTS: tuple[Moment, ...] = ("reading", "answering")
PLACED = 'outrigger_worker_groups{{worker="{}"}}'


@dataclass(frozen=True)
class Strike:
    """What happens to a process. ends: the answer under way fails and is asked for again."""

    process: str
    is_frozen: bool = False
    ends: bool = False

    @property
    def name(self) -> str:
        return f"{self.process} {'frozen' if self.is_frozen else 'killed'}"


STRIKES = (
    Strike("worker"),
    Strike("worker", is_frozen=True),
    Strike("worker-1"),
    Strike("worker-1", is_frozen=True),
    Strike("bridge-1"),
    Strike("bridge"),
    Strike("broker"),
    Strike("mac", ends=True),
)


@dataclass
class ProcessCounts(Compared):
    """What was compared, row by row."""

    strikes: int = 0
    remote_groups: int = 0
    journal_groups: int = 0
    rows: list[tuple[object, ...]] = field(default_factory=list)

    def compare(self, what: str, right: Sequence[object], found: Sequence[object]) -> int:
        """As Compared; a row of the table, too."""
        n_equal = super().compare(what, right, found)
        self.rows.append((what, max(len(right), len(found)), n_equal))
        return n_equal


def verify_processes(label: str, path: Path, report: Report) -> ProcessCounts:
    """Strikes every process at every moment. Raises ServiceError when the system does not start.

    Raises NotMeasuredError when the worker attended nothing at all.
    """
    counts = ProcessCounts()
    moments = MOMENTS[1:] if report.quick else MOMENTS
    with (
        Rig(path, pinned=False, hold="off", **SHAPE) as rig,  # type: ignore[arg-type]
        RunningSystem(
            path, like=None, **SHAPE, page_workers="1", worker_threads=1, worker_rest_s=0.2
        ) as system,
        system.client() as client,
    ):
        alone = rig.seat_alone()
        rig.wait_ready(alone)
        talk = _Talk(path, alone.client, system, client, counts)
        talk.turn(f"{label}, nothing struck")
        for strike in STRIKES:
            for moment in moments:
                talk.wait_whole(strike.name)
                talk.turn(f"{label}, {strike.name} while {moment}", strike, moment)
                report.progress(
                    f"{label}, {strike.name} while {moment}: {len(talk.tokens)} tokens so far, {talk.n_remote} groups "
                    f"by workers, {talk.n_journal} from the journal"
                )
        talk.wait_whole("the last strike")
        talk.turn(f"{label}, whole again")
        counts.remote_groups, counts.journal_groups = talk.n_remote, talk.n_journal
    if not counts.remote_groups:
        raise NotMeasuredError(f"{label}: the worker attended no group of pages in any turn")
    return counts


class _Talk:
    """The conversation, with both who answer it."""

    def __init__(
        self,
        path: Path,
        alone: HostClient,
        system: RunningSystem,
        client: OutriggerClient,
        counts: ProcessCounts,
    ) -> None:
        self.tokens = natural_tokens(path, N_BEGIN)
        self.n_remote, self.n_journal = 0, 0
        self._path, self._alone, self._system, self._client = path, alone, system, client
        self._counts, self._n_turns = counts, 0
        self._names = frozenset(system.pids())
        self._killed: set[int] = set()
        self._thaws: list[threading.Timer] = []
        vocabulary = Vocabulary.load(path)
        self._end_ids = frozenset(vocabulary.end_ids)
        vocabulary.close()

    def turn(self, what: str, strike: Strike | None = None, moment: Moment = "answering") -> None:
        """Asks both, compares; the conversation grows by the answer and by more text."""
        told = self._alone.generate(self.tokens, N_ANSWER).token_ids
        ends = [index for index, token_id in enumerate(told) if token_id in self._end_ids]
        right = told[: ends[0]] if ends else told
        before = self._groups()
        try:
            found, was_struck = self._answer(strike, moment)
        except OutriggerError as error:
            if not (strike and strike.ends):
                self._counts.problems.append(f"{what}: the answer ended: {type(error).__name__}: {error}")
            self._until_answers(what)
            found, was_struck = self._answer(None, moment)[0], True
        if strike and not was_struck:
            self._counts.problems.append(f"{what}: the answer was over before anything was struck")
        self._counts.compare(what, right, found)
        self._add(before)
        self._n_turns += 1
        more = natural_tokens(self._path, N_TURN, skip=self._n_turns * 4567 % TEXT_TOKENS)
        self.tokens = np.concatenate((self.tokens, np.array(right, np.int32), more))

    def wait_whole(self, after: str) -> None:
        """Until every process is there and awake, and both workers have pages."""
        for thaw in self._thaws:
            thaw.join()
        until_s = time.monotonic() + WHOLE_S_MAX
        while time.monotonic() < until_s:
            worker = "nobody"
            with contextlib.suppress(OutriggerError):
                worker = self._client.status().worker.state
            alive = {name for name, pid in self._system.pids().items() if pid not in self._killed}
            missing = self._names - alive
            n_groups = [self._system.value("broker", PLACED.format(number)) for number in (0, 1)]
            if all(n_groups) and worker == "ready" and not missing:
                return
            time.sleep(0.1)
        self._counts.problems.append(
            f"{WHOLE_S_MAX:.0f} s after {after} the system is not whole: worker {worker}, groups on workers: "
            f"{n_groups}, missing: {sorted(missing)}"
        )

    def _answer(self, strike: Strike | None, moment: Moment) -> tuple[tuple[int, ...], bool]:
        token_ids: list[int] = []
        was_struck = False
        prompt = self.tokens.tolist()
        with self._client.generate(prompt=prompt, max_tokens=N_ANSWER, temperature=0) as answer:
            for update in answer.updates():
                if isinstance(update, PieceWritten):
                    token_ids += update.token_ids
                reading = moment == "reading" and isinstance(update, ReadingPrompt)
                if strike and not was_struck and (reading or len(token_ids) >= STRIKES_ANSWER_AT):
                    was_struck = True
                    self._strike(strike)
        return tuple(token_ids), was_struck

    def _strike(self, strike: Strike) -> None:
        self._counts.strikes += 1
        pid = self._system.pids()[strike.process]
        os.kill(pid, signal.SIGSTOP if strike.is_frozen else signal.SIGKILL)
        if not strike.is_frozen:
            self._killed.add(pid)
        else:
            self._thaws.append(threading.Timer(FROZEN_S, _thaw, (pid,)))
            self._thaws[-1].start()

    def _until_answers(self, what: str) -> None:
        """Until the host can compute a token again."""
        until_s = time.monotonic() + WHOLE_S_MAX
        while time.monotonic() < until_s:
            with contextlib.suppress(OutriggerError):
                self._client.status()
                return
            time.sleep(0.1)
        raise ServiceError(f"{what}: {WHOLE_S_MAX:.0f} s later nobody answers")

    # --- counters

    def _groups(self) -> tuple[float, float]:
        told = (
            self._system.value("mac", f'outrigger_held_groups_total{{where="{w}"}}')
            for w in ("worker", "journal")
        )
        return next(told), next(told)

    def _add(self, before: tuple[float, float]) -> None:
        """A process that was started again counts from 0."""
        now = self._groups()
        more = [n - b if n >= b else n for n, b in zip(now, before, strict=True)]
        self.n_remote += int(more[0])
        self.n_journal += int(more[1])


def _thaw(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # somebody may have ended it meanwhile
        os.kill(pid, signal.SIGCONT)
