"""The supervision library (supervisor) at arm's length: its configuration, its process, and what it knows of ours.

It forks, waits, restarts what lived for a while, rotates logs and stops with TERM and then KILL; none of that is
written again here. What ends early it leaves to us: vigil.py knows the delays. It is a process of its own because it
forks, and is asked over XML-RPC on a socket in the private run directory.
"""

from __future__ import annotations

import asyncio
import http.client
import math
import os
import shlex
import socket
import sys
import xmlrpc.client
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervisor.xmlrpc import SupervisorTransport, UnixStreamHTTPConnection

import services
from common.errors import ServiceError
from common.log import get_log
from services.launch.logs import last_error, last_lines, log_path
from services.launch.programs import Program
from services.runtime.endpoints import ipc_endpoint
from services.runtime.guard import PARENT_VARIABLE

SOCKET = "supervisor.sock"
LOG = "supervisor"
GROUP = "outrigger"
EARLY_S = 10
"""A process that ends sooner is not started again by the library; one that lived longer, at once."""
STOP_WAIT_S = 3
"""From TERM to KILL; our processes leave within two seconds, those that drain after that."""
FINAL_CODE = 2
"""The end that no restart makes right: a bad setting."""
START_WAIT_S = 10.0
ANSWER_S = 5.0
"""A supervisor that does not answer for so long is stopped or stuck."""
POKE_S = 0.1
NO_ANSWER = (OSError, xmlrpc.client.Error, http.client.HTTPException)
ENDED = ("EXITED", "FATAL", "BACKOFF")
GONE = (*ENDED, "STOPPED")

log = get_log()


@dataclass(frozen=True)
class ProcessInfo:
    """What the library knows of one process."""

    name: str
    state: str
    """Its words: STARTING RUNNING BACKOFF STOPPING EXITED FATAL STOPPED UNKNOWN."""
    pid: int
    exit_code: int
    started: int
    """Wall clock of its last start; a restart shows here."""

    @property
    def has_ended(self) -> bool:
        """Whether it is down against our will: never started right, ended, or given up."""
        return self.state in ENDED

    @property
    def is_final(self) -> bool:
        """Whether it ended for good. (After any other end EXITED lasts a moment, until the library starts it again.)"""
        return self.state == "EXITED" and self.exit_code == FINAL_CODE

    @property
    def is_gone(self) -> bool:
        """Whether it does not run, for whatever reason."""
        return self.state in GONE


def configuration(run_dir: Path, programs: Iterable[Program]) -> str:
    """The library's configuration file. A percent sign begins a substitution there, so ours are doubled."""
    programs = tuple(programs)
    place = _quoted(str(run_dir))
    sections = [
        f"[supervisord]\nnodaemon=true\nsilent=true\nlogfile={place}/{LOG}.log\nlogfile_maxbytes=1MB\n"
        f"logfile_backups=1\npidfile={place}/{LOG}.pid\nidentifier=outrigger\n",
        f"[unix_http_server]\nfile={place}/{SOCKET}\nchmod=0700\n",
        "[rpcinterface:supervisor]\n"
        "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface\n",
    ]
    for program in programs:
        sections.append(
            f"[program:{program.name}]\ncommand={_quoted(shlex.join(program.command))}\n"
            f"autorestart=unexpected\nexitcodes={FINAL_CODE}\nstartsecs={EARLY_S}\nstartretries=0\n"
            f"stopsignal=TERM\nstopwaitsecs={math.ceil(program.drain_s) + STOP_WAIT_S}\nkillasgroup=true\n"
            f"redirect_stderr=true\n"
            f"stdout_logfile={_quoted(str(log_path(run_dir, program.name)))}\nstdout_logfile_maxbytes=10MB\n"
            f"stdout_logfile_backups=2\n"
        )
    # In one group they are stopped at the same time; groups are stopped one after the other.
    sections.append(f"[group:{GROUP}]\nprograms={','.join(program.name for program in programs)}\n")
    return "\n".join(sections)


class Supervisor:
    """The library's process. `start`, then `infos` as often as wanted, then `stop`."""

    def __init__(self, run_dir: Path) -> None:
        ipc_endpoint(run_dir / f"{SOCKET}.{2**22}")  # it binds beside its name, with its pid behind it
        self._run_dir = run_dir
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, programs: Iterable[Program], environ: Mapping[str, str]) -> None:
        """Start it, and with it all `programs`, in the environment `environ`. Raises ServiceError."""
        file = self._run_dir / f"{LOG}.conf"
        file.write_text(configuration(self._run_dir, programs))
        root = str(Path(services.__file__).parents[1])
        path = os.pathsep.join(part for part in (root, environ.get("PYTHONPATH", "")) if part)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.launch.supervisord", "-c", str(file)),
            env={**environ, "PYTHONPATH": path, PARENT_VARIABLE: str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=(self._run_dir / f"{LOG}.err").open("wb"),
            start_new_session=True,  # a Ctrl-C of the terminal is ours to pass on
        )
        try:
            async with asyncio.timeout(START_WAIT_S):
                # The socket of an earlier one that is still leaving answers, too: the pid tells them apart.
                while await self._pid() != self._process.pid:
                    if self._process.returncode is not None:
                        raise ServiceError(f"the supervisor did not start: {self._last_words()}")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise ServiceError(f"the supervisor did not start in {START_WAIT_S:g} s") from None

    async def infos(self) -> list[ProcessInfo]:
        """What it knows of each process. Raises ServiceError when it does not answer."""
        try:
            answer = await asyncio.to_thread(self._ask, "getAllProcessInfo")
        except NO_ANSWER as error:
            raise ServiceError(
                f"the supervisor (pid {self._process_pid}) does not answer: {error}"
            ) from error
        return [
            ProcessInfo(one["name"], one["statename"], one["pid"], one["exitstatus"], one["start"])
            for one in answer
        ]

    async def start_again(self, name: str) -> None:
        """Start a process that ended. Raises ServiceError."""
        await self._tell("startProcess", name)

    async def stop_one(self, name: str) -> None:
        """Ask one process to stop, and do not wait for it. Raises ServiceError."""
        await self._tell("stopProcess", name)

    async def kill(self) -> None:
        """End it at once; its processes notice that it is gone, and leave."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """Stop all processes and it; what does not leave is killed."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        ended = asyncio.ensure_future(self._process.wait())
        try:
            async with asyncio.timeout(STOP_WAIT_S + 3):
                while not ended.done():
                    await asyncio.wait({ended}, timeout=POKE_S)
                    # It looks at its children once a second, or when somebody asks it something.
                    with suppress(ServiceError):
                        await self.infos()
        except TimeoutError:
            await self.kill()

    async def _pid(self) -> int:
        """Pid of the one that answers; 0 when none does."""
        try:
            return await asyncio.to_thread(self._ask, "getPID")
        except NO_ANSWER:
            return 0

    @property
    def _process_pid(self) -> int:
        return self._process.pid if self._process else 0

    async def _tell(self, method: str, name: str) -> None:
        try:
            await asyncio.to_thread(self._ask, method, f"{GROUP}:{name}", False)
        except xmlrpc.client.Fault as fault:
            # It is running, or stopped, already: it moved on by itself since we looked.
            log.info("supervisor had no need", method=method, process=name, reason=fault.faultString)
        except NO_ANSWER as error:
            raise ServiceError(
                f"the supervisor (pid {self._process_pid}) does not answer: {error}"
            ) from error

    def _ask(self, method: str, *arguments: object) -> Any:
        transport = _Transport(self._run_dir / SOCKET)
        with xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport) as proxy:
            return getattr(proxy.supervisor, method)(*arguments)

    def _last_words(self) -> str:
        return last_error(last_lines(self._run_dir / f"{LOG}.err"))


class _Connection(UnixStreamHTTPConnection):
    """The library's connection, which would wait for ever for a supervisor that was stopped (SIGSTOP)."""

    def connect(self) -> None:
        """Connect, and give up what takes longer than ANSWER_S."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(self.socketfile)


class _Transport(SupervisorTransport):
    """The library's transport over such a connection."""

    def __init__(self, path: Path) -> None:
        super().__init__(None, None, f"unix://{path}")

        def get_connection() -> _Connection:
            connection = _Connection("localhost")
            connection.socketfile = str(path)
            return connection

        self._get_connection = get_connection


def _quoted(text: str) -> str:
    return text.replace("%", "%%")
