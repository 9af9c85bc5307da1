"""What is known of each process: what it says of itself, and what the supervisor sees. Asks and sends nothing.

Takes messages of route LIFE (the worker's are made from its control channel) and the supervisor's infos; the clock is
handed in. Whether a process is well is judged in vigil.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.wire.messages import Beat, StateChanged
from services.launch.supervisor import ProcessInfo

DOWN = {"BACKOFF": "backoff", "FATAL": "backoff", "EXITED": "backoff", "STOPPED": "stopped"}
"""The supervisor's words for a process that does not run, in ours."""
WELL = ("ready", "serving")


@dataclass
class Member:
    """One process. Times are of the monotonic clock."""

    name: str
    state: str = "not started"
    detail: str = ""
    listens: dict[str, str] = field(default_factory=dict)
    peer: bytes = b""
    """Its address on route LIFE; empty for one that is not on the bus."""
    pid: int = 0
    born_at: float = 0.0
    """When this life began."""
    heard_at: float | None = None
    """Its last sign of life; None before the first."""
    work: int = 0
    worked_at: float = 0.0
    """When `work` last grew."""
    restarts: int = 0
    """Lives that ended against our will; each is followed by another, sooner or later."""
    failures: int = 0
    """Lives in a row that ended early."""
    last_error: str = ""
    last_error_at: float = 0.0
    retry_at: float | None = None
    """When it is tried again."""

    def begin_life(self, pid: int, now: float) -> None:
        """It was started; what its earlier life said is over."""
        self.pid, self.state, self.detail, self.listens, self.peer = pid, "starting", "", {}, b""
        self.born_at, self.heard_at, self.retry_at = now, None, None
        self.work, self.worked_at = 0, now

    def ended(self, why: str, now: float) -> None:
        """Its life ended against our will."""
        self.restarts += 1
        self.last_error, self.last_error_at = why, now


class Roster:
    """The processes of one launch, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self.members = {name: Member(name) for name in names}

    def take(self, message: StateChanged | Beat, peer: bytes, now: float) -> None:
        """A process said how it is. One that we did not start, or an earlier life, is not ours to count."""
        member = self.members.get(message.process)
        if member is None:
            return
        if message.pid != member.pid:
            if member.pid and not (isinstance(message, StateChanged) and message.state == "starting"):
                return  # the last words of a life that is over
            member.begin_life(message.pid, now)
        member.peer, member.heard_at = peer, now
        if isinstance(message, Beat):
            if message.work != member.work:
                member.work, member.worked_at = message.work, now
            return
        member.state, member.detail, member.listens = message.state, message.detail, dict(message.listens)

    def see(self, info: ProcessInfo, now: float) -> None:
        """What the supervisor knows of one process."""
        member = self.members[info.name]
        if info.state in DOWN:
            state = "failed" if info.is_final else DOWN[info.state]
            member.state, member.detail, member.pid, member.peer = state, "", 0, b""
        elif info.pid and info.pid != member.pid:
            member.begin_life(info.pid, now)

    def forgive(self, seconds: float) -> None:
        """We ourselves did not look for so long: nobody's silence counts."""
        for member in self.members.values():
            member.worked_at += seconds
            member.born_at += seconds
            if member.heard_at is not None:
                member.heard_at += seconds

    @property
    def waiting_for(self) -> list[str]:
        """Names of those that are not ready yet."""
        return [name for name, member in self.members.items() if member.state not in WELL]

    @property
    def listens(self) -> dict[str, dict[str, str]]:
        """Where each process listens, by purpose."""
        return {name: member.listens for name, member in self.members.items() if member.listens}
