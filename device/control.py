"""The control channel: one command line in, one line of JSON out; `watch` keeps the line open.

Small and never urgent, so it runs on an asyncio loop in a thread of its own and cannot slow the tail layers. Every
command is a method of `Control`; what it tells comes from `device.facts` and from a function the worker gives it.
Knows neither engine nor residual channel.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, get_args, get_type_hints

from common.errors import RequestError, SettingError
from common.limits import CONTROL_LINE_BYTES_MAX, WORKER_CLIENTS_MAX
from common.log import get_log
from common.wire.cable_peers import may_connect
from common.wire.messages import ShowPhase
from device import facts

log = get_log()

PHASES = get_args(get_type_hints(ShowPhase)["phase"])
NOT_HERE = ("fetch", "load", "run", "unload")
LOW_MEMORY_MB = 256
LOOK_S = 2.0
"""Memory and heat are looked at so often for `watch`."""
IDLE_S_MAX = 300.0
"""A connection that asks nothing for so long is closed, unless it watches."""


class Facts(Protocol):
    """What is told of the machine: the module device.facts, or the emulator's version of it."""

    def memory(self) -> dict[str, int]: ...

    def thermal(self) -> int: ...

    def machine(self) -> str: ...


class Control:
    """Answers commands. `tail()` gives tail_state, tail_chunks and state, `life()` how the process is.

    `files` are the files the worker holds.
    `more` are further commands by name: each is given the words after its name.
    """

    def __init__(
        self,
        tail: Callable[[], dict[str, Any]],
        files: list[Path],
        life: Callable[[], dict[str, Any]],
        machine: Facts = facts,
        more: dict[str, Callable[[list[str]], dict[str, Any]]] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.phase = "starting"
        self.stopping = False
        self._tail, self._process_life = tail, life
        self._files = files
        self._facts = machine
        self._commands: dict[str, Callable[[list[str]], dict[str, Any]]] = {
            "mem": self._mem,
            "mac": self._mac,
            "ls": self._ls,
            "life": self._life,
            **(more or {}),
        }

    def answer(self, line: str) -> dict[str, Any]:
        """The answer to one command line; a bad line is answered with {"error": ...}."""
        words = line.split()
        name = words[0] if words else ""
        try:
            if name in NOT_HERE:
                raise RequestError(f"{name} is not implemented in this worker")
            if name not in self._commands:
                raise RequestError(f"unknown command {name[:40]!r}; there are mem, mac, ls, life and watch")
            return self._commands[name](words[1:])
        except (RequestError, SettingError) as error:
            self.counts["refused"] += 1
            return {"error": str(error)}

    def state(self) -> dict[str, Any]:
        """What `watch` tells; a new line is sent whenever it differs from the last."""
        available = self._facts.memory()["avail_mb"]
        return {
            "state": "stopping" if self.stopping else self._tail()["state"],
            "thermal": self._facts.thermal(),
            "memory_low": available < LOW_MEMORY_MB,
            "avail_mb": available,
        }

    def _mem(self, words: list[str]) -> dict[str, Any]:
        _no_arguments("mem", words)
        tail = self._tail()
        if self.stopping:
            tail["state"] = "stopping"
        return {
            **self._facts.memory(),
            "thermal": self._facts.thermal(),
            "machine": self._facts.machine(),
            "phase": self.phase,
            "pa_port": 0,
            "pa_held": 0,
            "pa_calls": 0,
            **tail,
        }

    def _mac(self, words: list[str]) -> dict[str, Any]:
        if not words or words[0] not in PHASES or len(words) > 4:
            raise RequestError(f"mac wants PHASE [N1] [N2] [CTX]; PHASE is one of {', '.join(PHASES)}")
        for word in words[1:]:
            if not (word.isascii() and word.isdigit() and len(word) <= 12):
                raise RequestError(f"mac wants whole numbers after the phase, not {word[:40]!r}")
        if words[0] != self.phase:
            self.phase = words[0]
            log.info("host phase", phase=self.phase, numbers=[int(word) for word in words[1:]])
        return {"ok": True}

    def _ls(self, words: list[str]) -> dict[str, Any]:
        _no_arguments("ls", words)
        return {
            "files": [
                {"name": path.name, "bytes": path.stat().st_size} for path in self._files if path.exists()
            ]
        }

    def _life(self, words: list[str]) -> dict[str, Any]:
        _no_arguments("life", words)
        return self._process_life()


def _no_arguments(name: str, words: list[str]) -> None:
    if words:
        raise RequestError(f"{name} takes no arguments")


class ControlServer:
    """Serves `control` on a listening socket from `start` to `stop`, on a thread of its own."""

    def __init__(self, listener: socket.socket, control: Control) -> None:
        self.control = control
        self._listener = listener
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Condition()
        self._n_changes = 0
        self._open = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> None:
        self._thread.start()

    def notify(self) -> None:
        """Something changed: tell those who watch. From any thread."""
        with suppress(RuntimeError):  # the loop may be closed already
            self._loop.call_soon_threadsafe(lambda: self._keep(asyncio.ensure_future(self._wake())))

    def announce_stop(self) -> None:
        """Tell watchers that the worker stops."""
        self.control.stopping = True
        self.notify()

    def stop(self, timeout_s: float) -> None:
        """Tell watchers that the worker stops, and end."""
        self.control.stopping = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: self._keep(asyncio.ensure_future(self._end())))
        self._thread.join(timeout_s)

    # --- on the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    async def _serve(self) -> None:
        self._main = asyncio.current_task()
        server = await asyncio.start_server(self._client, sock=self._listener, limit=CONTROL_LINE_BYTES_MAX)
        async with server:
            while True:
                await asyncio.sleep(LOOK_S)
                await self._wake()

    async def _end(self) -> None:
        await self._wake()
        await asyncio.sleep(0.05)  # the last lines leave
        for task in [*self._tasks, self._main]:
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    async def _wake(self) -> None:
        async with self._changed:
            self._n_changes += 1
            self._changed.notify_all()

    async def _change_after(self, seen: int) -> None:
        """Wait until something changed since `seen`: also what changed while the line before was being sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._n_changes != seen)

    def _keep(self, task: asyncio.Task[Any] | None) -> None:
        assert task is not None, "called from a task"
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.current_task())
        address = (writer.get_extra_info("peername") or ("",))[0]
        self._open += 1
        try:
            if not may_connect(address) or self._open > WORKER_CLIENTS_MAX:
                self.control.counts["turned_away"] += 1
                log.warning("control client turned away", peer=address, open=self._open)
                return
            await self._converse(reader, writer)
        except asyncio.CancelledError:
            pass  # the server stops; asyncio's streams would log the end of this task as a mistake
        except (ValueError, ConnectionError, TimeoutError) as error:
            self.control.counts["broken"] += 1  # an endless line, a client that left or sleeps
            log.info("control client left", peer=address, reason=str(error)[:200])
        finally:
            self._open -= 1
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await asyncio.wait_for(reader.readline(), IDLE_S_MAX):
            text = line.decode(errors="replace").strip()
            if text == "watch":
                await self._watch(reader, writer)
                return
            await _tell(writer, self.control.answer(text))

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the state now and after each change, until the client closes."""
        gone = asyncio.ensure_future(reader.read(1))
        try:
            told: dict[str, Any] = {}
            while not gone.done():
                seen = self._n_changes
                state = self.control.state()
                if {**state, "avail_mb": 0} != {**told, "avail_mb": 0}:  # memory alone moves all the time
                    await _tell(writer, state)
                    told = state
                change = asyncio.ensure_future(self._change_after(seen))
                await asyncio.wait((gone, change), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            gone.cancel()


async def _tell(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    async with asyncio.timeout(10):
        await writer.drain()
