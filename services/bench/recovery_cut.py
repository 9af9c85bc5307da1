"""`outrigger bench recovery`, its second part: what a conversation waits for when its worker or its host is gone.

`outrigger run` with a real worker on an emulated cable, pages of a 27B's shape, a conversation well past the host's
limit. The cable breaks in the middle of an answer; then mac, bridge and broker are killed at once in the middle of
another. Each answer must be, token for token, the undisturbed one of the same prompt. Beside it: what reading tokens
costs by computing. The model is small, so that seconds are the machinery's, not the layers'. Used by recovery.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from common.errors import ServiceError
from common.model.synthetic import ensure_preset
from services.bench.client import Answer, HostClient
from services.bench.compared import Compared
from services.bench.faults.far_end import FarEnd
from services.bench.faults.system import RunningSystem
from services.bench.report import NotMeasuredError, Report
from services.bench.texts import natural_tokens
from services.launch.vigil import EARLY_S

MODEL = "hybrid-27b-heads"
LIMIT, GROUP_TOKENS = 8192, 4096
SHAPE: dict[str, object] = {
    "n_ctx": 32_768,
    "threads": 1,
    "kv_host_tokens": LIMIT,
    "page_tokens": GROUP_TOKENS,
    "group_pages": 1,
    "worker_emulate": "loopback",
    "worker_threads": 1,
    "worker_rest_s": 0.2,
    "split": "on",
}
N_CONTEXT, N_CONTEXT_QUICK = 17_000, 13_000
"""Tokens of the conversation."""
N_READ, N_READ_TOLD = 4096, 65_536
"""Tokens of the read that is timed, and of the one that is told."""
N_ANSWER, STRUCK_AT = 32, 8
"""Tokens of an answer, and of them those that are there when something goes wrong."""
ROUNDS, ROUNDS_QUICK = 3, 1
WHOLE_S_MAX = 90.0
KILLED = ("mac", "bridge", "broker")
PLACED = 'outrigger_held_pages{where="worker"}'
BY_WORKER, BY_JOURNAL = (f'outrigger_held_groups_total{{where="{where}"}}' for where in ("worker", "journal"))

Tokens = NDArray[np.int32]


@dataclass
class Waits:
    """What was measured, one entry a round; seconds."""

    n_context: int
    compared: Compared = field(default_factory=Compared)
    token_s: list[float] = field(default_factory=list)
    """Of an undisturbed answer, from token to token."""
    cut_s: list[float] = field(default_factory=list)
    killed_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    """Of killed_s, until another mac process took requests."""
    n_read_again: list[int] = field(default_factory=list)
    """Tokens that were computed again after the host was killed."""
    read_s: float = 0.0
    """Of N_READ tokens that nobody had read before."""
    n_by_worker: int = 0
    """Groups of pages that the worker attended in the undisturbed answer."""
    n_by_journal: int = 0
    """And the host, from the journal, after cuts."""


class Struck(Exception):
    """The answer is followed no further."""


class Conversation:
    """One prompt, asked again and again of a system that something happens to."""

    def __init__(self, system: RunningSystem, prompt: Tokens, waits: Waits) -> None:
        self._system, self._prompt, self._waits = system, prompt, waits
        self._client = self._new_client()
        self._far_end = FarEnd(system.settings.worker.control_port)
        self.right: tuple[int, ...] = ()

    def close(self) -> None:
        self._client.close()
        self._far_end.close()

    def read(self, prompt: Tokens) -> float:
        """Seconds to the first token after a prompt of which nothing was read before."""
        answer = self._client.generate(prompt, 1)
        if answer.report.tokens_cache:
            raise NotMeasuredError(f"{answer.report.tokens_cache} tokens of the timed read came from a cache")
        return answer.first_token_s

    def undisturbed(self) -> None:
        """The answer that all others must be."""
        self._client.generate(self._prompt, 1)
        self.wait_whole()
        at: list[float] = []
        before = self._system.value("mac", BY_WORKER)
        self.right = self._ask(self._prompt, lambda _index, _id: at.append(time.monotonic())).token_ids
        self._waits.token_s += np.diff(at).tolist()
        self._waits.n_by_worker = int(self._system.value("mac", BY_WORKER) - before)

    def cut(self) -> None:
        """The cable breaks once some tokens came: seconds to the second token from then on.

        The first one may have been computed before, and on its way.
        """
        cut_at, at = 0.0, []

        def came(index: int, _id: int) -> None:
            nonlocal cut_at
            at.append(time.monotonic())
            if index == STRUCK_AT:
                cut_at = time.monotonic()
                self._far_end.arm("cut now")

        before = self._system.value("mac", BY_JOURNAL)
        found = self._ask(self._prompt, came).token_ids
        self._waits.n_by_journal += int(self._system.value("mac", BY_JOURNAL) - before)
        self._waits.cut_s.append(at[STRUCK_AT + 2] - cut_at)
        self._waits.compared.compare("cable cut", self.right, found)
        self.wait_whole()

    def killed(self) -> None:
        """mac, bridge and broker are killed at once; the conversation goes on where it was.

        Not before they have lived for a while: who dies young is not started again at once.
        """
        self._until(
            "the host's processes to have lived",
            lambda: min(self._system.uptimes_s().get(name, 0.0) for name in KILLED) > EARLY_S + 1,
        )
        came: list[int] = []

        def count(_index: int, token_id: int) -> None:
            came.append(token_id)
            if len(came) == STRUCK_AT:
                raise Struck

        with contextlib.suppress(Struck):
            self._ask(self._prompt, count)
        pids, killed_s = self._system.pids(), time.monotonic()
        for name in KILLED:
            os.kill(pids[name], signal.SIGKILL)
        self._client.close()  # in its mailbox the old process may still say that it is ready
        self._client = self._new_client()
        self._until_ready()
        prompt, asked_s = np.concatenate((self._prompt, np.array(came, np.int32))), time.monotonic()
        again = self._ask(prompt, n_tokens=N_ANSWER - len(came))
        self._waits.ready_s.append(asked_s - killed_s)
        self._waits.killed_s.append(asked_s - killed_s + again.first_token_s)
        self._waits.n_read_again.append(len(prompt) - again.report.tokens_cache)
        self._waits.compared.compare("host killed", self.right, (*came, *again.token_ids))
        self.wait_whole()

    def wait_whole(self) -> None:
        """Until the worker has what is not on the host. Raises ServiceError."""
        wanted = (len(self._prompt) - LIMIT) // GROUP_TOKENS
        self._until("the worker to have pages", lambda: self._system.value("broker", PLACED) >= wanted)

    # --- inside

    def _new_client(self) -> HostClient:
        client = HostClient(self._system.run_dir, name="bench")
        client.answer_s_max = WHOLE_S_MAX
        return client

    def _ask(
        self,
        prompt: Tokens,
        came: Callable[[int, int], None] = lambda _index, _id: None,
        n_tokens: int = N_ANSWER,
    ) -> Answer:
        began_s = time.monotonic()
        return self._client.finish(self._client.start(prompt, n_tokens), began_s, came)

    def _until_ready(self) -> None:
        """Until another mac process takes requests. Raises ServiceError."""

        def ready() -> bool:
            status = self._client.status(0.2)
            return status is not None and status.state == "ready"

        self._until("the host to come back", ready)

    def _until(self, what: str, true: Callable[[], bool]) -> None:
        until_s = time.monotonic() + WHOLE_S_MAX
        while not true():
            if time.monotonic() > until_s:
                raise ServiceError(f"waited {WHOLE_S_MAX:.0f} s for {what}:\n{self._system.said()[-2000:]}")
            time.sleep(0.02)


def measure(report: Report) -> Waits:
    """Everything, in one system. Raises ServiceError, NotMeasuredError."""
    path, waits = ensure_preset(MODEL), Waits(N_CONTEXT_QUICK if report.quick else N_CONTEXT)
    with RunningSystem(path, like=None, **SHAPE) as system:
        talk = Conversation(system, natural_tokens(path, waits.n_context), waits)
        try:
            report.progress(f"reading {N_READ:,} tokens, then {waits.n_context:,}")
            waits.read_s = talk.read(natural_tokens(path, N_READ, skip=waits.n_context))
            talk.undisturbed()
            for number in range(ROUNDS_QUICK if report.quick else ROUNDS):
                talk.cut()
                report.progress(f"round {number + 1}: the cable was cut")
                talk.killed()
                report.progress(f"round {number + 1}: mac, bridge and broker were killed")
        finally:
            talk.close()
    return waits


def tell(report: Report, waits: Waits) -> None:
    """The figures. Raises NotMeasuredError when nothing was compared, or no worker was asked."""
    compared, scale = waits.compared, N_READ_TOLD / N_READ
    for cut_s, killed_s, n_again in zip(waits.cut_s, waits.killed_s, waits.n_read_again, strict=True):
        report.row(
            first_token_after_cut_s=cut_s, first_token_after_kill_s=killed_s, tokens_read_again=n_again
        )
    report.row(read_s=waits.read_s, n_read=N_READ, token_s=waits.token_s)
    report.note(
        f"a conversation of {waits.n_context:,} tokens, {LIMIT:,} of them at most on the host. In an undisturbed "
        f"answer the worker attended {waits.n_by_worker:,} groups of pages; after cuts the host attended "
        f"{waits.n_by_journal:,} from the journal"
    )
    report.note(
        f"reread_s_per_64k is extrapolated: {N_READ:,} tokens were read in {waits.read_s:.2f} s, and {N_READ_TOLD:,} "
        f"take {scale:.0f} times as long at least, because each token attends all before it"
    )
    for problem in compared.problems:
        report.note(problem)
    report.figure(
        "first_token_after_cut_s",
        median(waits.cut_s),
        by_worker=waits.n_by_worker,
        by_journal=waits.n_by_journal,
    )
    report.figure("token_s_undisturbed", median(waits.token_s), tokens=len(waits.token_s))
    report.figure("first_token_after_kill_s", median(waits.killed_s), rounds=len(waits.killed_s))
    report.figure("host_ready_after_kill_s", median(waits.ready_s), rounds=len(waits.ready_s))
    report.figure("tokens_read_again_after_kill", median(waits.n_read_again), rounds=len(waits.n_read_again))
    report.figure("reread_s_per_64k", waits.read_s * scale, tokens=N_READ)
    report.figure("tokens_compared", compared.compared, tokens=compared.compared)
    report.figure("tokens_equal", float(compared.equal == compared.compared), tokens=compared.compared)
