"""kill -9 of each process of a running system, again and again, with a request under way each time.

What is promised (docs/operations.md): without the worker or the bridge the answer goes on, same tokens; without the
mac process or the gateway it ends with an error that says to send it again. After each kill the system answers again,
same tokens, without anybody's help. Used by services.bench.verify_faults.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import OutriggerError, ServiceError
from common.ggml.vocabulary import Vocabulary
from services.bench.compared import Compared
from services.bench.faults.footprint import footprints, leaks
from services.bench.faults.system import RunningSystem
from services.bench.report import Report
from services.bench.rig import Rig
from services.bench.texts import natural_tokens
from services.client import OutriggerClient, PieceWritten, ReadingPrompt
from services.launch.vigil import EARLY_S

GOES_ON = ("worker", "bridge")
ENDS = ("mac", "gateway")
N_PROMPT, N_TOKENS = 1100, 48
N_CTX = 4096
AGAIN_S_MAX = 90.0
TEXT_TOKENS, TEXT_STEP = 90_000, 4567


@dataclass
class _Victim:
    """What came of the kills of one process."""

    kills: int = 0
    in_flight: int = 0
    """Kills that struck a request under way."""
    went_on: int = 0
    ended: int = 0
    again_s_max: float = 0.0


@dataclass
class KillCounts(Compared):
    """All kills."""

    victims: dict[str, _Victim] = field(default_factory=dict)

    @property
    def n_kills(self) -> int:
        return sum(victim.kills for victim in self.victims.values())

    @property
    def rows(self) -> list[tuple[object, ...]]:
        """A line of the table for each process."""
        return [
            (name, each.kills, each.in_flight, each.went_on, each.ended, each.again_s_max)
            for name, each in self.victims.items()
        ]


def verify_kills(path: Path, report: Report, n_rounds: int) -> KillCounts:
    """n_rounds times each process in turn. Raises ServiceError when the system does not start."""
    counts = KillCounts(victims={name: _Victim() for name in (*GOES_ON, *ENDS)})
    with (
        Rig(path, n_ctx=N_CTX, pinned=False) as rig,
        RunningSystem(path, n_ctx=N_CTX, worker_rest_s=0.2, threads=1, worker_threads=1) as system,
        system.client() as client,
    ):
        alone = rig.seat_alone()
        rig.wait_ready(alone)
        prompts = _Prompts(path, lambda prompt: alone.client.generate(prompt, N_TOKENS).token_ids)
        before = footprints({"launch": system.pid})
        for number in range(n_rounds):
            for name in counts.victims:
                _kill(name, system, client, prompts, counts, while_reading=number % 2 == 0)
            told = ", ".join(f"{name} {each.again_s_max:.1f} s" for name, each in counts.victims.items())
            report.progress(f"kill -9, round {number + 1} of {n_rounds}; longest until it answered: {told}")
        counts.problems += leaks(before, lambda: footprints({"launch": system.pid}))
    for name, victim in counts.victims.items():
        if not victim.in_flight:
            counts.problems.append(f"no kill of {name} struck a request under way")
    return counts


class _Prompts:
    """Prompts that were never asked before, each with its right answer."""

    def __init__(self, path: Path, right: Callable[..., tuple[int, ...]]) -> None:
        self._path, self._right, self._n = path, right, 0
        vocabulary = Vocabulary.load(path)
        self._end_ids = frozenset(vocabulary.end_ids)
        vocabulary.close()

    def next(self) -> tuple[list[int], tuple[int, ...]]:
        """(token ids, tokens of the answer)."""
        prompt = natural_tokens(self._path, N_PROMPT, skip=self._n * TEXT_STEP % TEXT_TOKENS)
        self._n += 1
        right = self._right(prompt)
        ends = [index for index, token_id in enumerate(right) if token_id in self._end_ids]
        return prompt.tolist(), right[: ends[0]] if ends else right


def _kill(
    name: str,
    system: RunningSystem,
    client: OutriggerClient,
    prompts: _Prompts,
    counts: KillCounts,
    *,
    while_reading: bool,
) -> None:
    """One kill: what the request under way meets, then answers again until the worker takes part, too."""
    victim = counts.victims[name]
    prompt, right = prompts.next()
    while system.uptimes_s().get(name, 0.0) < EARLY_S:
        time.sleep(0.1)  # one that ends sooner is started again late on purpose
    pid = system.pids()[name]
    killed_at = 0.0

    def strike() -> None:
        nonlocal killed_at
        if not killed_at:
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()

    try:
        found, n_later = _answer(client, prompt, strike, while_reading=while_reading)
        counts.compare(f"the answer while {name} was killed", right, found)
        if name in GOES_ON and n_later:  # of the others the answer was written already, and only read later
            victim.in_flight += 1
            victim.went_on += 1
    except OutriggerError as error:
        victim.in_flight += 1
        victim.ended += 1
        if name in GOES_ON or not isinstance(error, ServiceError) or not str(error):
            counts.problems.append(f"{name} was killed and the answer ended: {type(error).__name__}: {error}")
    strike()  # the answer was over before the moment came
    victim.kills += 1
    _until_whole(name, system, client, prompts, counts, pid)
    victim.again_s_max = max(victim.again_s_max, time.monotonic() - killed_at)


def _answer(
    client: OutriggerClient, prompt: list[int], strike: Callable[[], None], *, while_reading: bool
) -> tuple[tuple[int, ...], int]:
    """The tokens of an answer, and how many messages came after `strike` was called in the middle of it."""
    token_ids: list[int] = []
    struck, n_later = False, 0
    with client.generate(prompt=prompt, max_tokens=N_TOKENS, temperature=0) as answer:
        for update in answer.updates():
            n_later += struck
            if isinstance(update, PieceWritten):
                token_ids += update.token_ids
            now = isinstance(update, ReadingPrompt if while_reading else PieceWritten)
            if now and not struck:
                strike()
                struck = True
    return tuple(token_ids), n_later


def _until_whole(
    name: str,
    system: RunningSystem,
    client: OutriggerClient,
    prompts: _Prompts,
    counts: KillCounts,
    killed_pid: int,
) -> None:
    """Wait for a right answer, the killed process's next life, and a worker that stands ready."""
    until_s = time.monotonic() + AGAIN_S_MAX
    prompt, right = prompts.next()
    answered = False
    why = "no answer"
    while time.monotonic() < until_s:
        try:
            if not answered:
                found, _ = _answer(client, prompt, lambda: None, while_reading=True)
                counts.compare(f"the answer after {name} was killed", right, found)
                answered = True
            why = f"the worker is {client.status().worker.state}"
            if why.endswith("ready") and system.pids().get(name, killed_pid) != killed_pid:
                return
        except OutriggerError as error:
            why = str(error)
        time.sleep(0.1)
    counts.problems.append(f"{AGAIN_S_MAX:.0f} s after {name} was killed the system is not whole: {why}")
