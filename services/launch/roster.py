"""Who is ready, who is not, and where they listen. Takes messages of route LIFE; asks and sends nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.wire.messages import Beat, StateChanged


@dataclass
class Member:
    """What is known of one process."""

    state: str = "not started"
    detail: str = ""
    listens: dict[str, str] = field(default_factory=dict)
    peer: bytes = b""
    pid: int = 0
    work: int = 0


class Roster:
    """The processes of one launch, by name."""

    def __init__(self, names: Iterable[str]) -> None:
        self.members = {name: Member() for name in names}

    def take(self, message: StateChanged | Beat, peer: bytes) -> None:
        """A process said how it is. One that we did not start is not ours to count."""
        member = self.members.get(message.process)
        if member is None:
            return
        member.peer, member.pid = peer, message.pid
        if isinstance(message, Beat):
            member.work = message.work
            return
        member.state, member.detail, member.listens = message.state, message.detail, dict(message.listens)

    def mark_ready(self, name: str) -> None:
        """A process that is not on the bus is ready, as its log says."""
        self.members[name].state = "ready"

    @property
    def waiting_for(self) -> list[str]:
        """Names of those that are not ready yet."""
        return [name for name, member in self.members.items() if member.state not in ("ready", "serving")]

    @property
    def listens(self) -> dict[str, dict[str, str]]:
        """Where each process listens, by purpose."""
        return {name: member.listens for name, member in self.members.items() if member.listens}
