"""From settings to a run of all processes: `launch(settings, ...)` is the whole of `outrigger run`.

Check, lock, cut the tail file, choose ports, then hand over to running.py, with signals turned into its events.
Whatever happens, the supervisor is stopped and the lock free before this returns.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from common.config import Settings, to_environ
from common.config.page_workers import page_worker_places, page_workers_here
from common.crash_note import remove_notes
from common.log import configure_log, get_log
from services.launch.lock import RunLock
from services.launch.logs import log_path, set_aside
from services.launch.ports import check_ports, free_ports
from services.launch.programs import (
    Program,
    programs_for,
    starts_worker,
    with_local_worker,
    with_page_workers_here,
)
from services.launch.roster import Roster
from services.launch.running import Launch
from services.launch.start_check import check_start
from services.launch.tail import tail_for
from services.launch.words import ready_text
from services.runtime.guard import Guard
from services.runtime.run_dir import open_run_dir

STOP_S_MAX = 10.0
"""A stop that takes longer, draining aside, ends by force; the supervisor follows."""

log = get_log()

Cutting = Callable[[], AbstractContextManager[Callable[[int, int], None]]]


def launch(settings: Settings, say: Callable[[str], None], cutting: Cutting, *, background: bool) -> int:
    """Run everything that `settings` ask for until told to stop; returns the exit code.

    `cutting` opens the progress that is shown while the worker's tail file is written; in the `background` there is
    no Ctrl-C to speak of. Raises SettingError, ModelError or ServiceError with a sentence for people.
    """
    run_dir = open_run_dir(settings.run_dir)
    lock = RunLock(run_dir)
    try:
        if lock.left_behind:
            say(
                f"an earlier run here (pid {lock.left_behind.get('pid')}) was killed; what it left is cleared"
            )
        model = Path(settings.host.model)
        missing = check_start(settings)
        for sentence in missing:
            say(sentence)
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
        if n_here := page_workers_here(settings.bridge.page_workers):
            settings = with_page_workers_here(settings, free_ports(n_here))

        def ready(roster: Roster, seconds: float) -> str:
            return ready_text(
                listens=roster.listens["gateway"],
                model=model,
                chats=not missing,
                worker=worker,
                page_workers=", ".join(map(str, page_worker_places(settings.bridge.page_workers))),
                run_dir=run_dir,
                seconds=seconds,
                has_key=bool(settings.gateway.api_key),
                background=background,
            )

        return run_programs(settings, programs_for(settings, local, n_here), lock, say, ready)
    finally:
        lock.release()


def run_programs(
    settings: Settings,
    programs: tuple[Program, ...],
    lock: RunLock,
    say: Callable[[str], None],
    ready: Callable[[Roster, float], str],
) -> int:
    """Run `programs` with `settings` until SIGTERM or SIGINT; returns the exit code, the reason having been told.

    A second signal cuts draining short; a third one ends at once. What is told is logged as launch.log, too.
    """
    remove_notes(settings.run_dir)
    set_aside(settings.run_dir, "launch")

    async def main() -> int:
        it = Launch(settings, programs, tell)
        loop = asyncio.get_running_loop()

        def stop(reason: str) -> None:
            log.info("stop asked", reason=reason)
            loop.call_soon_threadsafe(it.stopping.set)

        def hurry() -> None:
            loop.call_soon_threadsafe(it.hurry.set)

        drain_s = max((program.drain_s for program in programs), default=0.0)
        guard = Guard("outrigger", stop, stop_s=STOP_S_MAX + drain_s, hurry=hurry)
        guard.start()
        try:
            return await it.run(lock, {**os.environ, **to_environ(settings)}, ready)
        finally:
            guard.finish()

    def tell(text: str) -> None:
        log.info("told", line=text.partition("\n")[0])
        # Who read it is gone, or the file it goes to is full: no reason to end what serves.
        with suppress(OSError):
            say(text)

    file = log_path(settings.run_dir, "launch").open("a", buffering=1)
    try:
        configure_log("launch", level=settings.log.level, format="json", stream=file)
        return asyncio.run(main())
    finally:
        with suppress(OSError):  # the disk is full: the last lines are lost
            file.close()


def _wire_worker(settings: Settings, cutting: Cutting) -> Settings:
    """Cut the tail, choose the ports that were left open, and point bridge and worker at each other."""
    with cutting() as progress:
        tail = tail_for(Path(settings.host.model), settings.host.split_layer, settings.data_dir, progress)
    port, control_port = settings.worker.port, settings.worker.control_port
    if not port or not control_port:
        free = free_ports(2)
        port, control_port = port or free[0], control_port or free[1]
    return with_local_worker(settings, str(tail), (port, control_port))
