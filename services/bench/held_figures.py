"""What `outrigger bench held` makes of counters and reports: pure arithmetic, with counts of what took part.

Knows no processes. Used by held.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

from common.limits import UBATCH_TOKENS
from services.bench.client import Answer

PAGES = 'outrigger_page_attention_seconds_total{{part="{part}",rows="{rows}"}}'
GROUPS = 'outrigger_held_groups_total{{where="{where}"}}'
QUERY_BYTES = 'outrigger_link_bytes_total{{direction="{direction}",kind="queries"}}'


@dataclass(frozen=True)
class Pages:
    """What was counted of attention by pages while something ran: seconds, bytes of the attention channel, groups."""

    all_s: float
    wait_s: float
    worker_s: float
    n_bytes: float
    by_worker: float
    by_journal: float

    @classmethod
    def between(cls, before: dict[str, float], after: dict[str, float], rows: str) -> Pages:
        """From two scrapes of the mac process and, if there is one, the bridge. rows: of tokens ("one") or reads."""

        def grew(*names: str) -> float:
            return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names)

        return cls(
            all_s=grew(PAGES.format(part="all", rows=rows)),
            wait_s=grew(PAGES.format(part="wait", rows=rows)),
            worker_s=grew(PAGES.format(part="worker", rows=rows)),
            n_bytes=grew(*(QUERY_BYTES.format(direction=direction) for direction in ("in", "out"))),
            by_worker=grew(GROUPS.format(where="worker")),
            by_journal=grew(GROUPS.format(where="journal")),
        )

    def without(self, other: Pages) -> Pages:
        """What is left when the other's share is taken off."""
        return Pages(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class ReadSpent:
    """One continued read past the limit."""

    n_tokens: int
    seconds: float
    pages: Pages

    @classmethod
    def of(cls, answer: Answer, n_prompt: int, pages: Pages) -> ReadSpent:
        """Tokens that were read anew, and the seconds of that."""
        return cls(n_prompt - answer.report.tokens_cache, answer.report.prefill_s, pages)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds

    def ms_per_ubatch(self, seconds: float) -> float:
        """Of so many seconds, milliseconds that fall to one ubatch."""
        return 1000 * seconds * UBATCH_TOKENS / self.n_tokens

    @property
    def layers_ms(self) -> float:
        """Of an ubatch, everything on the host but attention by pages."""
        return self.ms_per_ubatch(self.seconds - self.pages.all_s)

    @property
    def own_pages_ms(self) -> float:
        """Of an ubatch, the host's attention of its own pages, asking and folding."""
        return self.ms_per_ubatch(self.pages.all_s - self.pages.wait_s)

    @property
    def wait_ms(self) -> float:
        """Of an ubatch, waiting for the worker alone."""
        return self.ms_per_ubatch(self.pages.wait_s)

    @property
    def worker_ms(self) -> float:
        """Of an ubatch, the worker's attention."""
        return self.ms_per_ubatch(self.pages.worker_s)


@dataclass(frozen=True)
class TokenSpent:
    """Milliseconds of one token of an answer, and of its parts."""

    all_ms: float
    pages_ms: float
    wait_ms: float
    worker_ms: float
    n_bytes: float

    @classmethod
    def of(cls, answer: Answer, pages: Pages) -> TokenSpent:
        """The mean token; the first one is the prompt's and not counted."""
        n = len(answer.token_ids) - 1
        return cls(
            all_ms=1000 * answer.report.decode_s / n,
            pages_ms=1000 * pages.all_s / n,
            wait_ms=1000 * pages.wait_s / n,
            worker_ms=1000 * pages.worker_s / n,
            n_bytes=pages.n_bytes / n,
        )

    @classmethod
    def median(cls, tokens: Sequence[TokenSpent]) -> TokenSpent:
        """Each part's median."""
        return cls(*(median(getattr(token, name) for token in tokens) for name in cls.__dataclass_fields__))


def own_memory_bytes(pid: int) -> int:
    """Memory that is a process's own: RssAnon and RssShmem, without pages of files. Raises OSError elsewhere."""
    return memory_of(Path(f"/proc/{pid}/status").read_text())


def memory_of(status: str) -> int:
    """The same, of the text of /proc/PID/status."""
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in status.splitlines())
        if name in ("RssAnon", "RssShmem")
    }
    return 1024 * (kib["RssAnon"] + kib["RssShmem"])
