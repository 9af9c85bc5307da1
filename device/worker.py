"""The worker process: loads the last layers of a model and serves them to one host at the end of a cable.

    outrigger worker --model tail.gguf            or: python -m device.worker --model tail.gguf

Wires the parts together and says when it is ready; every part lives in its own file (mirror, service, compute,
session, link_server, control). Ends within two seconds of SIGTERM or SIGINT, also in the middle of a chunk.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from common.config import Settings, WorkerSettings, find_file, load_settings
from common.engine.engine import Engine
from common.engine.first_start import check_first_start
from common.errors import OutriggerError, SettingError
from common.limits import CHUNK_WINDOW_MAX
from common.log import configure_log, get_log
from device import facts
from device.compute import ComputeThread
from device.control import Control, ControlServer
from device.link_server import LinkServer, listen
from device.mirror import TailMirror
from device.service import TailService, Terms

log = get_log()

PARENT_VARIABLE = "OUTRIGGER_PARENT_PID"
"""Set by a process that starts a worker which must not outlive it."""
PARENT_LOOK_S = 0.5
STOP_S_MAX = 1.5
"""A chunk that still computes after so long is abandoned with the process."""


class Worker:
    """One worker: two listening sockets, one engine. `start` returns once both channels are served."""

    def __init__(self, settings: WorkerSettings) -> None:
        if not settings.model:
            raise SettingError("worker.model is not given: name a tail file, or a whole model (--model FILE)")
        self.link_listener = listen(settings.host, settings.port)
        self.control_listener = listen(settings.host, settings.control_port)
        check_first_start()
        self.engine = Engine.load(
            settings.model, n_ctx=settings.n_ctx, n_threads=settings.n_threads, weights=settings.weights
        )
        device = f"{facts.machine()}, {settings.n_threads} threads"
        terms = Terms(secrets.randbits(63), device, window=CHUNK_WINDOW_MAX)
        self.service = TailService(TailMirror(self.engine), terms)
        self.compute = ComputeThread(self.service)
        self.control = ControlServer(self.control_listener, Control(self.tail, [Path(settings.model)]))
        self.link = LinkServer(
            self.link_listener, self.compute, window=CHUNK_WINDOW_MAX, on_change=self.control.notify
        )

    def tail(self) -> dict[str, Any]:
        """The tail's part of `mem`."""
        serving = self.link.serving is not None
        computing = "computing" if self.compute.busy else "idle"
        return {
            "state": "serving" if serving else "ready",
            "tail_state": computing if serving else "no host",
            "tail_chunks": self.service.n_chunks,
        }

    def start(self) -> None:
        self.compute.start()
        self.link.start()
        self.control.start()

    @property
    def ready_line(self) -> str:
        """What the worker serves and where."""
        spec, (host, port) = self.engine.spec, self.link.address
        layers = f"layers {spec.layers.start}-{spec.layers.stop - 1} of {spec.arch} ({spec.name})"
        return f"worker ready: {layers}, {host}:{port}, control {self.control.address[1]}"

    def stop(self) -> bool:
        """End clients and threads; False when a chunk is still computing and the process must simply exit."""
        self.link.stop()
        ended = self.compute.stop(STOP_S_MAX)
        self.control.stop(0.3)
        if ended:
            self.engine.close()
        return ended


def serve(settings: Settings, announce: Callable[[str], None] = print) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns the exit code."""
    configure_log("worker", level=settings.log.level, format=settings.log.format)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    worker = Worker(settings.worker)
    worker.start()
    log.info("worker ready", engine=worker.engine.describe())
    announce(worker.ready_line)
    parent_pid = os.environ.get(PARENT_VARIABLE)
    while not stopped.wait(PARENT_LOOK_S if parent_pid else None):
        if parent_pid and os.getppid() != int(parent_pid):
            log.warning("the process that started this one is gone")
            break
    start = time.monotonic()
    ended = worker.stop()
    log.info("worker stopped", seconds=round(time.monotonic() - start, 3), computing=not ended)
    sys.stdout.flush()
    sys.stderr.flush()
    if not ended:
        os._exit(0)  # the compute thread is inside a kernel that cannot be interrupted
    return 0


@click.command()
@click.option("--model", "tail", type=click.Path(path_type=Path), help="Tail file, or a whole model.")
@click.option("--host", "listen_host", help="Address to listen on: loopback or link-local.  [127.0.0.1]")
@click.option("--port", "listen_port", type=int, help="Residual port; 0 takes a free one.  [50060]")
@click.option("--control-port", "listen_control_port", type=int, help="Control port.  [50061]")
@click.option("--threads", "worker_threads", type=int, help="Computing threads.  [half of the cores]")
@click.option("--n-ctx", "worker_ctx", type=int, help="Tokens of context; as many as the host's.  [8192]")
@click.option("--weights", "worker_weights", help="Layout of the weights: repack or plain.  [repack]")
def command(**flags: Any) -> None:
    """Serve the last layers of a model to a host at the other end of a cable.

    Runs in the foreground until Ctrl-C. Any machine with this command can be a worker; a tail file is written by
    `outrigger split`. Only this machine and link-local addresses may connect.
    """
    try:
        settings = load_settings(find_file(os.environ), os.environ, flags)
        code = serve(settings, lambda line: print(line, flush=True))
    except OutriggerError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)


if __name__ == "__main__":
    command()
