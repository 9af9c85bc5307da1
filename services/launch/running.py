"""One run of all processes: started, counted in, watched, asked how they are, and stopped in order.

Knows no settings but those of life and death, and no program but what it is given. Made by launch.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from common.config import Settings
from common.errors import ServiceError, SettingError
from common.wire.messages import AskLaunch, Beat, LaunchStatus, ProcessStatus, StateChanged
from common.wire.routes import LIFE
from services.launch.first_answer import can_answer
from services.launch.lock import RunLock
from services.launch.logs import last_lines, log_path, set_aside
from services.launch.programs import LOOPBACK, WORKER, Program
from services.launch.roster import WELL, Member, Roster
from services.launch.supervisor import POKE_S, ProcessInfo, Supervisor
from services.launch.watch import GivenUpError, Watch
from services.launch.worker_line import follow_worker
from services.runtime.bus import Owner
from services.runtime.endpoints import route_endpoint

EXIT_OK = 0
EXIT_NOT_STARTED = 3
LOOK_S = 0.2
WATCH_S = 1.0
SAY_AFTER_S = 2.0
"""What takes longer is told, and told again as often."""
LOG_LINES, LOG_LINE_MAX = 6, 300
"""How much of a failed process's log is shown."""
DRAIN_TOLD_S = 1.5
ORPHANS_S = 3.0
"""Our processes leave within this when the supervisor is gone."""
FIRST_TO_STOP = "gateway"
"""It drains while those it needs still serve."""


class StartError(ServiceError):
    """A process did not become ready; the message is for people."""


class Launch:
    """One run of all processes. `tell` gets lines for people."""

    def __init__(
        self, settings: Settings, programs: tuple[Program, ...], tell: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.programs = programs
        self.roster = Roster(program.name for program in programs)
        self.supervisor = Supervisor(settings.run_dir)
        self.watch = Watch(settings.run_dir, settings.run, self.roster, self.supervisor, tell)
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        """Stop without waiting for answers that are being written."""
        self.state: Literal["starting", "serving", "stopping"] = "starting"
        self._tell = tell
        self._began_s = time.monotonic()

    async def run(
        self, lock: RunLock, environ: Mapping[str, str], ready: Callable[[Roster, float], str]
    ) -> int:
        """Start, watch, stop; returns the exit code. `ready` makes the text that is told when all are ready."""
        async with Owner(LIFE, route_endpoint(self.settings.run_dir, LIFE)) as life:
            tasks = [asyncio.create_task(self._listen(life))]
            worker_at = self.settings.worker.host, self.settings.worker.control_port
            for program in self.programs:
                if not program.on_bus:
                    at = (LOOPBACK, program.control_port) if program.control_port else worker_at
                    following = follow_worker(program.name, *at, self._heard)
                    tasks.append(asyncio.create_task(following))
            try:
                for program in self.programs:
                    set_aside(self.settings.run_dir, program.name)
                await self.supervisor.start(self.programs, environ)
                if await self._become_ready():
                    await self._answer()
                    self.state = "serving"
                    self._tell(ready(self.roster, time.monotonic() - self._began_s))
                    self._write_note(lock)
                    await self._serve(life)
            except (StartError, GivenUpError) as error:
                self._tell(
                    f"{error}\n{self._log_end(error)}" if isinstance(error, GivenUpError) else str(error)
                )
                return EXIT_NOT_STARTED
            except ServiceError as error:
                self._tell(f"{error}; everything ends")
                await self.supervisor.kill()
                return EXIT_NOT_STARTED
            finally:
                self.state = "stopping"
                self._tell("stopping ...")
                self._write_note(lock)
                await self._stop()
                for task in tasks:
                    task.cancel()
        return EXIT_OK

    # --- what is said to us

    async def _listen(self, life: Owner) -> None:
        async for received in life:
            if isinstance(received.message, AskLaunch):
                with suppress(ServiceError):  # whoever asked is gone
                    await life.send(self.status(), to=received.peer)
            else:
                self._heard(received.message, received.peer)

    def _heard(self, message: StateChanged | Beat, peer: bytes = b"") -> None:
        self.roster.take(message, peer, time.monotonic())

    def status(self) -> LaunchStatus:
        """How everything is."""
        now = time.monotonic()
        return LaunchStatus(
            pid=os.getpid(),
            state=self.state,
            model=Path(self.settings.host.model).stem,
            http=self.roster.listens.get("gateway", {}).get("http", ""),
            uptime_s=now - self._began_s,
            processes=tuple(self._process_status(each, now) for each in self.roster.members.values()),
        )

    def _process_status(self, member: Member, now: float) -> ProcessStatus:
        verdict = self.watch.verdict(member, now)
        return ProcessStatus(
            process=member.name,
            state=verdict.state,
            pid=member.pid,
            uptime_s=now - member.born_at if member.pid else 0.0,
            restarts=member.restarts,
            detail=verdict.detail,
            last_error=member.last_error,
            last_error_s=now - member.last_error_at if member.last_error else 0.0,
            listens=member.listens,
        )

    # --- from start to stop

    async def _become_ready(self) -> bool:
        """True when all are ready, False when a stop was asked first. Raises StartError."""
        told_s = time.monotonic()
        while self.roster.waiting_for:
            if await self._asked(self.stopping, LOOK_S):
                return False
            now = time.monotonic()
            infos = await self.supervisor.infos()
            self.watch.read_ends(now, tell=False)
            for info in infos:
                self.roster.see(info, now)
                if info.has_ended:
                    raise StartError(self._why_not(info))
            if now - told_s > SAY_AFTER_S and self.roster.waiting_for:
                told_s = now
                self._tell(f"{now - self._began_s:3.0f} s: waiting for {', '.join(self.roster.waiting_for)}")
        return True

    async def _answer(self) -> None:
        """Wait until the whole can answer; a stop that is asked meanwhile is not held up."""
        if http := self.roster.listens.get("gateway", {}).get("http"):
            with_worker = any(program.name == WORKER.name for program in self.programs)
            waiting = asyncio.create_task(can_answer(http, with_worker=with_worker))
            stop = asyncio.create_task(self.stopping.wait())
            await asyncio.wait({waiting, stop}, return_when=asyncio.FIRST_COMPLETED)
            for task in (waiting, stop):
                task.cancel()

    async def _serve(self, life: Owner) -> None:
        """Until a stop is asked. Raises GivenUpError, and ServiceError when the supervisor is gone."""
        while True:
            for member in self.roster.members.values():
                if member.state == "ready" and member.peer:
                    with suppress(ServiceError):  # it ended just now; the next look tells
                        await life.send(StateChanged("launch", os.getpid(), "serving"), to=member.peer)
            if await self._asked(self.stopping, WATCH_S):
                return
            await self.watch.look(time.monotonic())

    async def _stop(self) -> None:
        """Let answers end that are being written, then stop everybody; who does not leave is killed."""
        with suppress(ServiceError):  # a supervisor that is gone has nothing to stop
            await self._drain()
        await self.supervisor.stop()
        await self._end_orphans()

    async def _drain(self) -> None:
        """Stop the gateway first, and wait for it as long as its answers may take."""
        program = next((each for each in self.programs if each.name == FIRST_TO_STOP), None)
        if program is None or self.roster.members[program.name].state not in WELL or self.hurry.is_set():
            return
        began_s, told = time.monotonic(), False
        await self.supervisor.stop_one(program.name)
        while not await self._asked(self.hurry, POKE_S):
            if any(info.name == program.name and info.is_gone for info in await self.supervisor.infos()):
                return
            if not told and time.monotonic() - began_s > DRAIN_TOLD_S:
                told = True
                self._tell(
                    f"waiting up to {program.drain_s:g} s for answers that are being written; again: do not wait"
                )
        if pid := self.roster.members[program.name].pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    async def _end_orphans(self) -> None:
        """Processes that outlive the supervisor (it was killed) leave by themselves; make sure of it."""
        pids = {member.pid for member in self.roster.members.values() if member.pid}
        give_up_at = time.monotonic() + ORPHANS_S
        while (pids := {pid for pid in pids if _lives(pid)}) and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # nobody tells us of the end of processes that are not our children
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _asked(self, event: asyncio.Event, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await event.wait()
        except TimeoutError:
            return False
        return True

    # --- words

    def _why_not(self, info: ProcessInfo) -> str:
        member = self.roster.members[info.name]
        why = member.last_error or "its command cannot be run"
        return f"{info.name} did not start: {why}\n{_shown(log_path(self.settings.run_dir, info.name))}"

    def _log_end(self, error: GivenUpError) -> str:
        return _shown(log_path(self.settings.run_dir, error.process))

    def _write_note(self, lock: RunLock) -> None:
        """Say what runs, for `status`; a disk that became full must not end what runs, nor keep it from ending."""
        try:
            lock.write(self._note())
        except SettingError as error:
            self._tell(str(error))

    def _note(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "state": self.state,
            "model": Path(self.settings.host.model).stem,
            "http": self.roster.listens.get("gateway", {}).get("http", ""),
            "stop_s_max": self.settings.gateway.drain_s,
        }


def _lives(pid: int) -> bool:
    """Whether a process runs. One that ended, and that nobody asked about yet, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _shown(path: Path) -> str:
    """The end of a log, indented."""
    return "\n".join(
        [f"  end of {path}:", *(f"  | {line[:LOG_LINE_MAX]}" for line in last_lines(path)[-LOG_LINES:])]
    )
