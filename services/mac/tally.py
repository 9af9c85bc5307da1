"""What the mac process counts for Prometheus. The series are declared in common.metrics; here is when they grow.

Told by the compute thread what happened, by the loop's thread how things stand. Knows nothing else.
"""

from __future__ import annotations

from common.metrics import Metrics
from common.wire.messages import HostStatus, ReadReport


class Tally:
    """The counters of one process."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.metrics = metrics or Metrics("mac")
        self._attended, self._waited, self._answered = (
            [
                self.metrics.adder("page_attention_seconds_total", part=part, rows=rows)
                for rows in ("one", "many")
            ]
            for part in ("all", "wait", "worker")
        )

    def read_done(self, report: ReadReport) -> None:
        """A prompt is through all layers."""
        metrics = self.metrics
        metrics.add("prompt_tokens_total", report.tokens_cache, source="cache")
        metrics.add("prompt_tokens_total", report.tokens_host, source="host")
        metrics.add("prompt_tokens_total", report.tokens_worker, source="worker")
        if report.bypass_reason:
            metrics.add("worker_bypass_total", reason=report.bypass_reason)
        metrics.add("bubble_seconds_total", report.wait_s)
        self._count_prefill(report)
        for stage in report.stages:
            metrics.observe("stage_seconds", stage.head_s, side="host", phase="head")
            if stage.tail_s:
                metrics.observe("stage_seconds", stage.tail_s, side="host", phase="tail")
            if stage.worker_s:
                metrics.observe("stage_seconds", stage.worker_s, side="worker", phase="tail")
                metrics.observe("stage_seconds", stage.round_trip_s, side="worker", phase="round_trip")
                metrics.observe("stage_seconds", stage.import_s, side="host", phase="import")

    def _count_prefill(self, report: ReadReport) -> None:
        """Tokens and seconds of each side, of which its prefill rate is made, and of both together by the clock."""
        n_tokens, stages = report.tokens_host + report.tokens_worker, report.stages
        tokens = {"host": n_tokens, "worker": report.tokens_worker, "together": n_tokens}
        seconds = {
            "host": sum(stage.head_s + stage.tail_s for stage in stages),
            "worker": sum(stage.worker_s for stage in stages),
            "together": report.prefill_s,
        }
        for side in tokens:
            self.metrics.add("prefill_tokens_total", tokens[side], side=side)
            self.metrics.add("prefill_seconds_total", seconds[side], side=side)

    def returned(self) -> None:
        """The rest of a split read went back to the host: the worker had become too slow."""
        self.metrics.add("worker_returned_total")

    def fell_back(self, cause: str) -> None:
        """A worker failed; its part of a read is redone on the host."""
        self.metrics.add("worker_fallback_total", cause=cause)
        self._count_nonfinite(cause)

    def groups_attended(self, n: int, worker: int | None) -> None:
        """So many groups of old pages were attended by a worker, or (None) from the journal's files."""
        self.metrics.add("held_groups_total", n, where="journal" if worker is None else "worker")
        if worker is not None:
            self.metrics.add("worker_attended_groups_total", n, worker=str(worker))

    def attended_by_pages(self, n_tokens: int, seconds: float) -> None:
        """The compute thread spent so long in one layer's attention by pages."""
        self._attended[n_tokens > 1](seconds)

    def waited_for_pages(self, n_tokens: int, seconds: float, worker_s: float) -> None:
        """Of that it only waited so long for a worker, which was busy for worker_s with its answer."""
        self._waited[n_tokens > 1](seconds)
        self._answered[n_tokens > 1](worker_s)

    def pages_fell_back(self, cause: str) -> None:
        """A worker failed to answer for pages; the journal's were attended here."""
        self.metrics.add("pages_fallback_total", cause=cause)
        self._count_nonfinite(cause)

    def _count_nonfinite(self, cause: str) -> None:
        if cause == "nonfinite":
            self.metrics.add("merge_nonfinite_total")

    def pages_recalled(self, n: int) -> None:
        """So many pages of one layer came back from the journal into memory."""
        self.metrics.add("pages_recalled_total", n)

    def pages_waiting(self, n: int) -> None:
        """So many pages of one layer are with the broker and not kept yet."""
        self.metrics.set("journal_lag_pages", n)

    def shadow_checked(self, outcome: str) -> None:
        """A group was attended on both sides and compared."""
        self.metrics.add("shadow_checks_total", outcome=outcome)

    def diverged(self, cause: str) -> None:
        """A prompt parted from the rows at hand, and some of them were lost by it."""
        self.metrics.add("prefix_divergence_total", cause=cause)

    def made_canonical(self, n_tokens: int) -> None:
        """So many tokens of an answer were run again in idle time."""
        self.metrics.add("canonical_tokens_total", n_tokens)

    def token_sent(self, compute_s: float) -> None:
        """A token left; compute_s: what it took to compute and choose it."""
        self.metrics.add("generation_tokens_total")
        self.metrics.add("decode_seconds_total", compute_s)

    def stands(self, status: HostStatus) -> None:
        """How the host is right now."""
        self.metrics.set("requests_running", status.requests_running)
        self.metrics.set("requests_waiting", status.requests_waiting)
        self.metrics.set("split_layer", status.worker.split_layer)
        self.metrics.set_state("worker_state", "state", status.worker.state)
