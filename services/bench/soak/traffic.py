"""Clients of a soak: each on a thread of its own, asking what its plan says and comparing every token.

A request that ends with an error counts as failed: only while the host's own processes are killed may it, and then it
is asked again. Used by services.bench.soak.run.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from common.errors import OutriggerError, RequestError
from services.bench.drill.system import Struckable
from services.bench.drill.trial import Prompt
from services.bench.soak.plan import Deed
from services.client import OutriggerClient, PieceWritten

PROBLEMS_MAX = 20
AGAIN_S = 0.5
EXCUSED_S = 30.0
"""After the host's own process was killed, a request may fail for so long; each is asked again."""


class Traffic:
    """All clients. `counts` and `problems` may be read at any time."""

    def __init__(
        self, system: Struckable, prompts: Sequence[Prompt], plans: Sequence[Iterator[Deed]]
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._system, self._prompts = system, prompts
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._killed_s = float("-inf")
        self._threads = [
            threading.Thread(target=self._live, args=(plan,), name=f"client {number}")
            for number, plan in enumerate(plans)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each client end what it does."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def excuse(self) -> None:
        """A process without which no request goes on is killed now."""
        self._killed_s = time.monotonic()

    def _live(self, plan: Iterator[Deed]) -> None:
        client = self._system.system.client()
        try:
            for deed in plan:
                if self._stopping.wait(deed.pause_s):
                    return
                if deed.kind == "reconnect":
                    client.close()
                    client = self._system.system.client()
                self._insist(client, deed)
        finally:
            client.close()

    def _insist(self, client: OutriggerClient, deed: Deed) -> None:
        """Do it, again if need be while the host comes back from a kill."""
        while True:
            try:
                self._do(client, deed)
                return
            except OutriggerError as error:
                late = time.monotonic() > self._killed_s + EXCUSED_S
                if late or isinstance(error, RequestError):
                    self._count("failed", f"{deed.kind}: {type(error).__name__}: {error}")
                    return
                self._count("asked_again")
            time.sleep(AGAIN_S)

    def _do(self, client: OutriggerClient, deed: Deed) -> None:
        prompt = self._prompts[deed.prompt]
        if prompt.n_first:  # a conversation that grows
            with client.generate(
                prompt=prompt.token_ids[: prompt.n_first], max_tokens=1, temperature=0
            ) as answer:
                answer.text()
        token_ids: list[int] = []
        n_updates = 0
        asked = {"prompt": prompt.token_ids, "max_tokens": len(prompt.right), "temperature": 0}
        with client.generate(**asked, report=True) as answer:  # type: ignore[arg-type]
            for update in answer.updates():
                n_updates += 1
                if isinstance(update, PieceWritten):
                    token_ids += update.token_ids
                if deed.kind == "cancel" and n_updates >= deed.leaves_after:
                    self._count("cancel")
                    return
            finished = answer.finished
        report = (finished and finished.report) or {}
        n_equal = sum(a == b for a, b in zip(prompt.right, token_ids, strict=False))
        n_total = max(len(prompt.right), len(token_ids))
        with self._lock:
            self.counts["compared"] += n_total
            self.counts["equal"] += n_equal
            self.counts["tokens_worker"] += report.get("tokens_worker", 0)
            self.counts["reads_struck"] += bool(report.get("fallbacks"))
        self._count(
            deed.kind, "" if n_equal == n_total else f"{deed.kind}: {n_equal} of {n_total} tokens equal"
        )

    def _count(self, what: str, problem: str = "") -> None:
        with self._lock:
            self.counts[what] += 1
            if problem and len(self.problems) < PROBLEMS_MAX:
                self.problems.append(problem)
