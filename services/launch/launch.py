"""The order of a start, a watch and a stop. `launch(settings, say)` is the whole of `outrigger run`.

Check, lock, cut the tail file, start everything, count in who is ready, tell the person, then watch until a signal
comes or something fails for good. Whatever happens, the supervisor is stopped before this returns.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from common.config import Settings, to_environ
from common.errors import ModelError, ServiceError
from common.wire.messages import StateChanged
from common.wire.routes import LIFE
from services.launch.lock import RunLock
from services.launch.logs import contains, last_error, last_lines, log_path, set_aside
from services.launch.ports import check_ports, free_ports
from services.launch.programs import Program, programs_for, starts_worker, with_local_worker
from services.launch.roster import Roster
from services.launch.supervisor import ProcessInfo, Supervisor
from services.launch.tail import tail_for
from services.launch.words import ready_text
from services.runtime.bus import Owner
from services.runtime.endpoints import route_endpoint
from services.runtime.guard import Guard
from services.runtime.run_dir import open_run_dir

EXIT_OK = 0
EXIT_NOT_STARTED = 3
LOOK_S = 0.2
WATCH_S = 1.0
SAY_AFTER_S = 2.0
"""What takes longer is told, and told again as often."""
LOG_LINES, LOG_LINE_MAX = 6, 300
"""How much of a failed process's log is shown."""
STOP_S_MAX = 8.0
"""After this the launch leaves by force, and the supervisor follows it."""
WORKER_READY = "worker ready"
"""What the worker's log holds once it serves."""


class StartError(ServiceError):
    """A process did not become ready, or failed for good; the message is for people."""


class Launch:
    """One run of all processes. `say` gets lines for people."""

    def __init__(self, settings: Settings, programs: tuple[Program, ...], say: Callable[[str], None]) -> None:
        self.settings = settings
        self.programs = programs
        self.roster = Roster(program.name for program in programs)
        self.supervisor = Supervisor(settings.run_dir)
        self.stopping = asyncio.Event()
        self._say = say
        self._started: dict[str, int] = {}
        self._began_s = time.monotonic()

    async def run(self, lock: RunLock, ready: Callable[[Roster, float], str]) -> int:
        """Start, watch, stop; returns the exit code. `ready` makes the text that is told when all are ready."""
        async with Owner(LIFE, route_endpoint(self.settings.run_dir, LIFE)) as life:
            listening = asyncio.create_task(self._listen(life))
            try:
                environ = {**os.environ, **to_environ(self.settings)}
                for program in self.programs:
                    set_aside(self.settings.run_dir, program.name)
                await self.supervisor.start(self.programs, environ)
                if await self._become_ready(life):
                    self._say(ready(self.roster, time.monotonic() - self._began_s))
                    lock.write(self._note())
                    await self._watch(life)
            except StartError as error:
                self._say(str(error))
                return EXIT_NOT_STARTED
            finally:
                self._say("stopping ...")
                await self.supervisor.stop()
                listening.cancel()
        return EXIT_OK

    async def _listen(self, life: Owner) -> None:
        async for received in life:
            self.roster.take(received.message, received.peer)

    async def _become_ready(self, life: Owner) -> bool:
        """True when all are ready, False when a stop was asked first. Raises StartError."""
        told_s = time.monotonic()
        while self.roster.waiting_for:
            if await self._stop_asked(LOOK_S):
                return False
            for info in await self.supervisor.infos():
                if info.has_ended:
                    raise StartError(self._why(info, "did not start"))
                self._started[info.name] = info.started
            for program in self.programs:
                if not program.on_bus and contains(
                    log_path(self.settings.run_dir, program.name), WORKER_READY
                ):
                    self.roster.mark_ready(program.name)
            if time.monotonic() - told_s > SAY_AFTER_S and self.roster.waiting_for:
                told_s = time.monotonic()
                self._say(
                    f"{told_s - self._began_s:3.0f} s: waiting for {', '.join(self.roster.waiting_for)}"
                )
        return True

    async def _let_serve(self, life: Owner) -> None:
        """Tell those that are ready that the house is open."""
        for member in self.roster.members.values():
            if member.state == "ready" and member.peer:
                with suppress(ServiceError):  # it ended just now; the supervisor tells
                    await life.send(StateChanged("launch", os.getpid(), "serving"), to=member.peer)

    async def _watch(self, life: Owner) -> None:
        """Until a stop is asked. Tells of restarts; raises StartError when the supervisor gives a process up."""
        waiting: set[str] = set()
        while True:
            await self._let_serve(life)
            if await self._stop_asked(WATCH_S):
                return
            for info in await self.supervisor.infos():
                if info.state in ("FATAL", "EXITED"):
                    raise StartError(self._why(info, "failed for good"))
                if info.state == "BACKOFF" and info.name not in waiting:
                    waiting.add(info.name)
                    self._say(self._why(info, "ended and is tried again"))
                elif info.state != "BACKOFF":
                    waiting.discard(info.name)
                    if info.started != self._started.get(info.name):
                        self._say(f"{info.name} was started again (pid {info.pid})")
                        self._started[info.name] = info.started

    async def _stop_asked(self, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await self.stopping.wait()
        except TimeoutError:
            return False
        return True

    def _why(self, info: ProcessInfo, what: str) -> str:
        path = log_path(self.settings.run_dir, info.name)
        said = self.roster.members[info.name].detail if info.name in self.roster.members else ""
        code = f" (exit code {info.exit_code})" if info.exit_code else ""
        return f"{info.name} {what}{code}: {said or last_error(path)}\n{_shown(path)}"

    def _note(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "state": "serving",
            "model": Path(self.settings.host.model).stem,
            "http": self.roster.listens.get("gateway", {}).get("http", ""),
            "listens": self.roster.listens,
        }


def _shown(path: Path) -> str:
    """The end of a log, indented."""
    return "\n".join(
        [f"  end of {path}:", *(f"  | {line[:LOG_LINE_MAX]}" for line in last_lines(path)[-LOG_LINES:])]
    )


def launch(
    settings: Settings,
    say: Callable[[str], None],
    cutting: Callable[[], AbstractContextManager[Callable[[int, int], None]]],
) -> int:
    """Run everything that `settings` ask for until told to stop; returns the exit code.

    `cutting` opens the progress that is shown while the worker's tail file is written.
    Raises SettingError, ModelError or ServiceError with a sentence for people when that cannot be done.
    """
    run_dir = open_run_dir(settings.run_dir)
    lock = RunLock(run_dir)
    try:
        model = Path(settings.host.model)
        if not model.is_file():
            raise ModelError(
                f"there is no model file {model}: run `make setup`, or name another with --model"
            )
        local = starts_worker(settings)
        check_ports(settings, local_worker=local)
        worker = "none"
        if local:
            settings = _wire_worker(settings, cutting)
            worker = (
                f"this machine, {settings.worker.n_threads} thread(s), {Path(settings.worker.model).name}"
            )
        elif settings.host.split == "on":
            worker = f"{settings.bridge.worker_host}:{settings.bridge.worker_port}"

        def ready(roster: Roster, seconds: float) -> str:
            return ready_text(
                http=roster.listens["gateway"]["http"],
                model=model,
                worker=worker,
                run_dir=run_dir,
                seconds=seconds,
                has_key=bool(settings.gateway.api_key),
            )

        return run_programs(settings, programs_for(settings, local), lock, say, ready)
    finally:
        lock.release()


def run_programs(
    settings: Settings,
    programs: tuple[Program, ...],
    lock: RunLock,
    say: Callable[[str], None],
    ready: Callable[[Roster, float], str],
) -> int:
    """Run `programs` with `settings` until SIGTERM or SIGINT; returns the exit code, the reason having been told."""

    async def main() -> int:
        it = Launch(settings, programs, say)
        loop = asyncio.get_running_loop()

        def stop(_reason: str) -> None:
            loop.call_soon_threadsafe(it.stopping.set)

        guard = Guard("outrigger", stop, stop_s=STOP_S_MAX)
        guard.start()
        try:
            return await it.run(lock, ready)
        finally:
            guard.finish()

    return asyncio.run(main())


def _wire_worker(
    settings: Settings, cutting: Callable[[], AbstractContextManager[Callable[[int, int], None]]]
) -> Settings:
    """Cut the tail, choose the ports that were left open, and point bridge and worker at each other."""
    with cutting() as progress:
        tail = tail_for(Path(settings.host.model), settings.host.split_layer, settings.data_dir, progress)
    port, control_port = settings.worker.port, settings.worker.control_port
    if not port or not control_port:
        free = free_ports(2)
        port, control_port = port or free[0], control_port or free[1]
    return with_local_worker(settings, str(tail), (port, control_port))
