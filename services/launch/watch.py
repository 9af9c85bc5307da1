"""Looks after the processes that run: once a second, one look. Carries out what vigil.py decides.

A look takes the supervisor's view and the ends since the last look, tells what is new, ends a process that is silent
or stuck for too long (after it was asked for its traces), and starts again what the supervisor leaves to us. Used by
running.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.config import RunSettings
from common.crash_note import note_path, read_note
from common.errors import ServiceError
from services.launch.endings import why_ended
from services.launch.ends import EndReader
from services.launch.roster import WELL, Member, Roster
from services.launch.supervisor import ProcessInfo, Supervisor
from services.launch.vigil import EARLY_S, NEEDED, Verdict, judge, retry_wait_s

TRACES_S = 0.5
"""What a stuck process gets to write its traces before it is killed."""
LATE_S = 3.0
"""A look that comes so much later than the last one was not made in time: we were stopped, or starved."""
UNWELL = ("silent", "stuck")


class GivenUpError(ServiceError):
    """A process without which nothing is served ended for good."""

    def __init__(self, process: str, why: str) -> None:
        super().__init__(f"{process} failed for good: {why}")
        self.process = process


class Watch:
    """The looks of one launch. `tell` gets lines for people."""

    def __init__(
        self,
        run_dir: Path,
        settings: RunSettings,
        roster: Roster,
        supervisor: Supervisor,
        tell: Callable[[str], None],
    ) -> None:
        self.ends = EndReader(run_dir)
        self._run_dir, self._settings = run_dir, settings
        self._roster, self._supervisor, self._tell = roster, supervisor, tell
        self._looked_at: float | None = None
        self._ended_by_us: dict[int, str] = {}
        self._told_pid: dict[str, int] = {}
        self._told_state: dict[str, str] = {}
        self._told_detail: dict[str, str] = {}

    async def look(self, now: float) -> None:
        """One look. Raises GivenUpError, and ServiceError when the supervisor does not answer."""
        if self._looked_at is not None and now - self._looked_at > LATE_S:
            self._roster.forgive(now - self._looked_at)
        self._looked_at = now
        infos = await self._supervisor.infos()
        self.read_ends(now)
        for info in infos:
            self._roster.see(info, now)
            await self._care(info, self._roster.members[info.name], now)
        for member in self._roster.members.values():
            await self._judge(member, now)

    def read_ends(self, now: float, *, tell: bool = True) -> None:
        """Take in which processes ended, and why."""
        for end in self.ends.read():
            member = self._roster.members.get(end.process)
            if member is None:
                continue
            why = why_ended(self._run_dir, end, self._ended_by_us.pop(end.pid, ""))
            note_path(self._run_dir, end.process, end.pid).unlink(missing_ok=True)
            member.ended(why, now)
            self._told_pid[end.process] = end.pid
            if tell:
                self._tell(f"{end.process} (pid {end.pid}) ended: {why}")

    def verdict(self, member: Member, now: float) -> Verdict:
        """How a member is; with what it computes, when it is at it for long."""
        settings = self._settings
        verdict = judge(member, now, silence_s=settings.silence_s, stall_s=settings.stall_s)
        if not member.pid or verdict.detail in ("", member.detail):
            return verdict
        doing = "; ".join(read_note(self._run_dir, member.name, member.pid))
        if not doing:
            return verdict
        return Verdict(verdict.state, f"{verdict.detail}: {doing}", verdict.reason_to_end)

    async def _care(self, info: ProcessInfo, member: Member, now: float) -> None:
        """Start again what ended, and tell when it runs."""
        if info.is_final:
            if member.name in NEEDED:
                raise GivenUpError(member.name, member.last_error)
            if self._told_state.get(member.name) != "failed":
                self._told_state[member.name] = "failed"
                self._tell(f"{member.name} failed for good; the host goes on without it")
        elif info.state in ("BACKOFF", "FATAL"):
            if member.retry_at is None:
                member.failures += 1
                wait_s = retry_wait_s(member.failures)
                member.retry_at = now + wait_s
                self._tell(f"{member.name} is tried again in {wait_s:.0f} s")
            elif now >= member.retry_at:
                member.retry_at = None
                await self._supervisor.start_again(member.name)
        elif info.pid:
            if self._told_pid.setdefault(member.name, info.pid) != info.pid:
                self._told_pid[member.name] = info.pid
                self._tell(f"{member.name} was started again (pid {info.pid})")
            if now - member.born_at > EARLY_S:
                member.failures = 0

    async def _judge(self, member: Member, now: float) -> None:
        """Tell when a member is unwell or has something to say, and end one that is unwell for too long."""
        verdict = self.verdict(member, now)
        said, says = (
            self._told_detail.get(member.name, ""),
            member.detail if member.state == "serving" else "",
        )
        self._told_detail[member.name] = says
        if says and says != said:
            self._tell(f"{member.name}: {says}")
        before, self._told_state[member.name] = self._told_state.get(member.name, ""), verdict.state
        if verdict.state in UNWELL and before != verdict.state:
            self._tell(f"{member.name} (pid {member.pid}) is {verdict.state}: {verdict.detail}")
        elif before in UNWELL and verdict.state in WELL and member.pid not in self._ended_by_us:
            self._tell(f"{member.name} is {verdict.state} again")
        if verdict.reason_to_end and member.pid not in self._ended_by_us:
            self._ended_by_us[member.pid] = verdict.reason_to_end
            await self._end(member.pid)

    async def _end(self, pid: int) -> None:
        """Ask for the traces of all threads (they go to its log), then kill: whoever hangs hears no SIGTERM."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            await asyncio.sleep(TRACES_S)
            os.kill(pid, signal.SIGKILL)
