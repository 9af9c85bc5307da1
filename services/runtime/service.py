"""The skeleton of every process on the host: starting, ready, serving, draining, stopped.

    async def body(life: Life) -> None:
        async with Owner(GENERATE, life.endpoint(GENERATE), on_event=life.on_bus_event) as owner:
            life.spawn(answer(owner), "answer")       # a task that fails ends the process, loudly
            await life.ready({"http": url})
            await life.stopping.wait()                # SIGTERM, SIGINT, or the parent is gone
        # leaving the blocks is the draining; the guard allows it STOP_S, and what life.allow_drain added

    if __name__ == "__main__":
        raise SystemExit(run_service("mac", body))

The skeleton loads the settings, starts logs, metrics, faulthandler and the guard, and tells launch over route LIFE
how far the process is. It knows nothing of what a process does. A failure ends in one line and an exit code.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Literal

from common.config import Settings, find_file, load_settings
from common.crash_note import CrashNote, Slot
from common.errors import OutriggerError, ServiceError
from common.log import configure_log, get_log
from common.metrics import Metrics
from common.wire.messages import Beat, StateChanged
from common.wire.routes import LIFE, Route
from services.runtime.bus import Asker, BusEvent
from services.runtime.endpoints import route_endpoint
from services.runtime.exposition import Exposition
from services.runtime.guard import STOP_S, Guard, parent_pid_in
from services.runtime.leaving import leave, one_line, report_failure, threads_ended
from services.runtime.run_dir import open_run_dir

EXIT_OK = 0
BEAT_S = 1.0
LIFE_WAIT_S = 0.3
"""How long a word to launch may take; launch also sees processes end."""
THREAD_PREFIX = "off loop"

State = Literal["starting", "ready", "serving", "draining", "stopped"]
Body = Callable[["Life"], Awaitable[None]]

log = get_log()


class Life:
    """What a process's body is given: its settings, its metrics, and the ways to say how it is."""

    def __init__(self, process: str, settings: Settings, metrics: Metrics, note: CrashNote) -> None:
        self.process = process
        self.settings = settings
        self.metrics = metrics
        self.stopping = asyncio.Event()
        """Set when the process is to drain and leave."""
        self.state: State = "starting"
        self.was_ready = False
        self.work = 0
        """Grown by the thread that does the work; a beat that stands still shows a stuck one. 0: no such thread."""
        self._work_now: Callable[[], int] | None = None
        self._note = note
        self._guard: Guard | None = None
        self._listens: dict[str, str] = {}
        self._detail = ""
        self._launch: Asker | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    @property
    def run_dir(self) -> Path:
        """Folder of sockets and logs; private to this user."""
        return self.settings.run_dir

    def endpoint(self, route: Route) -> str:
        """Address of `route` in this run."""
        return route_endpoint(self.run_dir, route)

    def crash_slot(self) -> Slot:
        """For each thread that calls native code: where it says what it is about to do."""
        return self._note.slot()

    def allow_drain(self, seconds: float) -> None:
        """After a stop is asked, the body may take so long to end what runs, on top of its STOP_S."""
        assert self._guard is not None
        self._guard.stop_s = STOP_S + seconds

    def follow(self, work_now: Callable[[], int]) -> None:
        """From now on `work` is asked of a counter that the working thread grows."""
        self._work_now = work_now

    def on_bus_event(self, event: BusEvent) -> None:
        """For every channel's `on_event`: logs, and counts what was dropped. Any thread."""
        fields = {"route": event.route, "peer": event.peer, "detail": event.detail}
        if event.kind == "joined":
            log.info("bus peer joined", **fields)
            return
        log.warning(f"bus {event.kind.replace('_', ' ')}", count=event.count, **fields)
        reason = "lost" if event.kind == "gap" else event.kind
        if reason in ("stale", "replayed", "foreign", "lost"):
            self.metrics.add("bus_dropped_total", event.count, route=event.route, reason=reason)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside the body until the process stops. If it raises, the process ends with that error."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    async def ready(self, listens: Mapping[str, str] | None = None, detail: str = "") -> None:
        """Everything is loaded and bound; `listens` says where, by purpose."""
        self._listens |= listens or {}
        self.was_ready = True
        await self._move("ready", detail)
        if self._launch is None:
            await self._move("serving", self._detail)

    async def say(self, detail: str) -> None:
        """What people should know of a process that serves, such as whom it waits for; "" takes it back."""
        self._detail = detail
        await self._tell_launch(self.state, detail)

    def stop(self) -> None:
        """Drain and leave. Event loop's thread."""
        self.spawn(self._drain(), "drain")

    def fail(self, error: BaseException) -> None:
        """End the process because of `error`; the first one counts. Event loop's thread."""
        if self._failure is None:
            self._failure = error
        self.stopping.set()

    # --- for the skeleton itself

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _move(self, state: State, detail: str = "") -> None:
        """Go to `state` and tell."""
        self.state = state
        more: dict[str, object] = {"pid": os.getpid()} if state == "starting" else {}
        more |= {"detail": detail} if detail else {}
        log.info(f"process {state}", **more, **self._listens)
        await self._tell_launch(state, detail)

    async def _tell_launch(self, state: State, detail: str) -> None:
        if self._launch is not None:
            with suppress(ServiceError):  # launch is gone; the guard knows what that means
                said = StateChanged(self.process, os.getpid(), state, detail, self._listens)
                await self._launch.send(said, wait_s=LIFE_WAIT_S)

    async def _drain(self) -> None:
        await self._move("draining")
        self.stopping.set()

    async def _talk_with_launch(self) -> None:
        """Beat, and hear that all processes are ready."""
        assert self._launch is not None
        self.spawn(self._beat(self._launch), "beat")
        async for received in self._launch:
            if received.message.state == "serving" and self.state == "ready":
                await self._move("serving", self._detail)

    async def _beat(self, launch: Asker) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.work = self._work_now() if self._work_now else self.work
            with suppress(ServiceError):
                await launch.send(Beat(self.process, os.getpid(), self.work), wait_s=0)


def run_service(
    process: str,
    body: Body,
    *,
    metrics_port: int | None = None,
    flags: Mapping[str, Any] | None = None,
    number: int = 0,
) -> int:
    """Live one process's life; returns its exit code. `metrics_port` overrides the process's own setting.

    number: of several processes of one kind each has its own, which is part of its name; 0 is the first, or only, one.
    """
    kind, process = process, process_name(process, number)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # what launch sends before it ends a process that is stuck
    try:
        settings = load_settings(find_file(os.environ), os.environ, flags)
        configure_log(process, level=settings.log.level, format=settings.log.format)
        note = CrashNote(open_run_dir(settings.run_dir), process, os.getpid())
    except OutriggerError as error:
        return report_failure(process, error)
    if metrics_port is None:
        metrics_port = numbered_port(getattr(settings.metrics, f"{kind}_port"), number)
    threads = ThreadPoolExecutor(thread_name_prefix=THREAD_PREFIX)
    runner = asyncio.Runner()
    runner.get_loop().set_default_executor(threads)
    failure = runner.run(_live(Life(process, settings, Metrics(kind), note), body, metrics_port))
    code = EXIT_OK if failure is None else report_failure(process, failure)
    note.remove()
    if not threads_ended(threads):
        leave(code)
    runner.close()
    return code


def process_name(kind: str, number: int) -> str:
    """The name under which a process of several of its kind is started, told of and logged."""
    return f"{kind}-{number}" if number else kind


def numbered_port(port: int, number: int) -> int:
    """Where process `number` of a kind listens whose first one listens at `port`; 0: any free port."""
    return port + number if port else 0


async def _live(life: Life, body: Body, metrics_port: int) -> BaseException | None:
    """From starting to stopped; returns what went wrong, if anything did."""
    loop = asyncio.get_running_loop()

    def ask_stop(reason: str) -> None:
        log.info("stop asked", reason=reason)
        loop.call_soon_threadsafe(life.stop)

    parent_pid = parent_pid_in(os.environ)
    guard = life._guard = Guard(life.process, ask_stop, parent_pid=parent_pid)
    guard.start()
    try:
        async with AsyncExitStack() as stack:
            if parent_pid is not None:
                name = life.process.replace("-", ".")  # a name on the bus has no hyphen
                asker = Asker(LIFE, life.endpoint(LIFE), name=name, on_event=life.on_bus_event)
                life._launch = await stack.enter_async_context(asker)
                life.spawn(life._talk_with_launch(), "launch")
            await life._move("starting")
            try:
                life._listens["metrics"] = stack.enter_context(Exposition(life.metrics, metrics_port)).url
                await _run_body(life, body)
            except Exception as error:
                life.fail(error)
            await life._move("stopped", "" if life._failure is None else one_line(life._failure))
            await _cancel(life._tasks)
    finally:
        guard.finish()
    return life._failure


async def _run_body(life: Life, body: Body) -> None:
    """Run the body to its end. Told to stop, it sees `stopping` and leaves in its own way; the guard waits for it.

    A body that is still loading, or whose task failed, is cancelled instead: nobody listens to it.
    """
    main = asyncio.ensure_future(body(life))
    stopping = asyncio.ensure_future(life.stopping.wait())
    await asyncio.wait({main, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not main.done() and (life._failure is not None or not life.was_ready):
        main.cancel()
    with suppress(asyncio.CancelledError):
        await main


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    running = list(tasks)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
