"""The worker process: loads the last layers of a model and serves them to one host at the end of a cable.

    outrigger worker --model tail.gguf            or: python -m device.worker --model tail.gguf

Wires the parts together and says when it is ready; every part lives in its own file (life, mirror, service, compute,
session, link_server, control). The control channel answers from the first moment, the residual channel once the model
is loaded.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from common.config import Settings, WorkerSettings, find_file, load_settings
from common.engine.engine import Engine
from common.engine.first_start import check_first_start
from common.errors import OutriggerError, SettingError
from common.limits import CHUNK_WINDOW_MAX, MIB
from common.log import configure_log
from common.wire.cable_peers import may_connect
from device import facts
from device.compute import ComputeThread
from device.control import Control, ControlServer, Facts
from device.emulator.service import EmulatedService
from device.emulator.stand_in import StandIn
from device.life import EXIT_SETTING, PROCESS, Life, live
from device.link_server import LinkServer, listen
from device.mirror import TailMirror
from device.service import TailService, Terms
from device.tail_fetch import TailFetch, parse_source

TAILS_FOLDER = "tails"
TELL_EVERY_S = 2.0
COMPUTE_STOP_S = 1.2
"""How long a stop waits for the chunk at hand; after that life leaves without it."""


class Worker:
    """One worker: two listening sockets, one engine. Made when it listens; `start` loads and serves."""

    def __init__(self, settings: WorkerSettings, life: Life) -> None:
        if not settings.model:
            raise SettingError("worker.model is not given: name a tail file, or a whole model (--model FILE)")
        check_address(settings.host)
        self._settings, self._life = settings, life
        self.link_listener = listen(settings.host, settings.port)
        self.stand_in = StandIn(settings) if settings.emulate or settings.faults else None
        self._machine: Facts = self.stand_in or facts
        more = self.stand_in.commands() if self.stand_in else {}
        control = Control(self.tail, [Path(settings.model)], self.life, machine=self._machine, more=more)
        self.control = ControlServer(listen(settings.host, settings.control_port), control)
        self.link: LinkServer | None = None

    def start(self) -> None:
        """Load the model; return once both channels are served. Raises ModelError or EngineError."""
        settings, slot = self._settings, self._life.crash_slot()
        self.control.start()
        slot.write("checking the build")
        check_first_start()
        slot.write(f"loading {settings.model}")
        self.engine = Engine.load(
            settings.model, n_ctx=settings.n_ctx, n_threads=settings.n_threads, weights=settings.weights
        )
        slot.clear()
        device = f"{self._machine.machine()}, {settings.n_threads} threads"
        terms = Terms(secrets.randbits(63), device, window=CHUNK_WINDOW_MAX)
        mirror, stand_in = TailMirror(self.engine, settings.snapshot_mib * MIB), self.stand_in
        self.service = EmulatedService(mirror, terms, stand_in) if stand_in else TailService(mirror, terms)
        self.compute = ComputeThread(self.service, crash_slot=slot)
        self.compute.start()
        self.link = LinkServer(
            self.link_listener,
            self.compute,
            window=CHUNK_WINDOW_MAX,
            on_change=self.control.notify,
            wrap=stand_in.wrap if stand_in else lambda sock: sock,
        )
        self.link.start()
        if stand_in is not None:
            stand_in.start(self.service, self.control.notify)

    def tail(self) -> dict[str, Any]:
        """The tail's part of `mem`."""
        if self.link is None:
            return {"state": "starting", "tail_state": "no host", "tail_chunks": 0}
        serving = self.link.serving is not None
        computing = "computing" if self.compute.busy else "idle"
        told = self.stand_in.state if self.stand_in else ""
        return {
            "state": told or ("serving" if serving else "ready"),
            "tail_state": computing if serving else "no host",
            "tail_chunks": self.service.n_chunks,
        }

    def life(self) -> dict[str, Any]:
        """The answer to `life`: how far the process is, and that its threads take turns."""
        state: str = self._life.state
        if state == "ready" and self.link is not None and self.link.serving is not None:
            state = "serving"
        host, port = self.link_listener.getsockname()[:2] if state != "draining" else ("", 0)
        return {
            "process": PROCESS,
            "pid": os.getpid(),
            "state": state,
            "beat": self.compute.beat if self.link is not None else 0,
            "link": f"{host}:{port}",
        }

    @property
    def ready_line(self) -> str:
        """What the worker serves and where."""
        assert self.link is not None
        spec, (host, port) = self.engine.spec, self.link.address
        layers = f"layers {spec.layers.start}-{spec.layers.stop - 1} of {spec.arch} ({spec.name})"
        return f"worker ready: {layers}, {host}:{port}, control {self.control.address[1]}"

    def stop(self) -> None:
        """End clients and threads."""
        assert self.link is not None
        self.control.announce_stop()
        self.link.stop()
        ended = self.compute.stop(COMPUTE_STOP_S)
        self.control.stop(0.3)
        if ended:
            self.engine.close()


def with_tail(settings: Settings, life: Life, announce: Callable[[str], None]) -> WorkerSettings:
    """The worker's settings with a tail file that is here: fetched from the bridge when they name one (--from)."""
    worker = settings.worker
    if not worker.source:
        return worker
    if worker.model:
        raise SettingError(
            f"worker.source is {worker.source} and worker.model {worker.model}; give one of them"
        )
    source, said_at = parse_source(worker.source), time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > TELL_EVERY_S or done == total:
            said_at = time.monotonic()
            announce(f"tail file: {done / max(total, 1):.0%} of {total / 1e6:.0f} MB")

    path = TailFetch(source, settings.data_dir / TAILS_FOLDER, tell, life.stopping.is_set).run()
    return replace(worker, model=str(path))


def check_address(host: str) -> None:
    """Raises SettingError unless only this machine, or a neighbour at a cable, can reach `host`."""
    if host != "localhost" and not may_connect(host):
        raise SettingError(
            f"worker.host = {host!r} (OUTRIGGER_LISTEN_HOST, --host): it must be an address of loopback or of a cable "
            f"(link-local: 169.254.x.x, fe80::), for the worker's protocol has no key; 127.0.0.1 is this machine"
        )


def serve(settings: Settings, announce: Callable[[str], None] = print) -> int:
    """Run a worker until SIGTERM or SIGINT. Returns the exit code."""
    configure_log(PROCESS, level=settings.log.level, format=settings.log.format)

    def body(life: Life) -> None:
        worker = Worker(with_tail(settings, life, announce), life)
        worker.start()
        life.ready(engine=worker.engine.describe())
        for line in worker.stand_in.tell() if worker.stand_in else ():
            announce(line)
        announce(worker.ready_line)
        life.stopping.wait()
        worker.stop()

    return live(settings, body)


@click.command()
@click.option("--model", "tail", type=click.Path(path_type=Path), help="Tail file, or a whole model.")
@click.option(
    "--from", "tail_from", metavar="HOST[:PORT]", help="Fetch the tail file from the host's bridge."
)
@click.option("--host", "listen_host", help="Address to listen on: loopback or link-local.  [127.0.0.1]")
@click.option("--port", "listen_port", type=int, help="Residual port; 0 takes a free one.  [50060]")
@click.option("--control-port", "listen_control_port", type=int, help="Control port.  [50061]")
@click.option("--threads", "worker_threads", type=int, help="Computing threads.  [half of the cores]")
@click.option("--n-ctx", "worker_ctx", type=int, help="Tokens of context; as many as the host's.  [8192]")
@click.option("--weights", "worker_weights", help="Layout of the weights: repack or plain.  [repack]")
@click.option(
    "--emulate", "worker_emulate", metavar="LINK", help="Be as far away as LINK: usb-c, usb2, wifi."
)
@click.option(
    "--faults", "worker_faults", metavar="SCRIPT", help='Let faults happen: "cut in chunk 3", @FILE.'
)
@click.option("--fault-seed", "worker_fault_seed", type=int, help="Seed of jitter and flipped bits.  [0]")
def command(**flags: Any) -> None:
    """Serve the last layers of a model to a host at the other end of a cable.

    Runs in the foreground until Ctrl-C. Any machine with this command can be a worker; a tail file is written by
    `outrigger split`. Only this machine and link-local addresses may connect.
    """
    try:
        settings = load_settings(find_file(os.environ), os.environ, flags)
        code = serve(settings, lambda line: print(line, flush=True))
    except OutriggerError as error:
        if isinstance(error, SettingError):
            click.echo(f"Error: {error}", err=True)
            raise SystemExit(EXIT_SETTING) from error
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)


if __name__ == "__main__":
    command()
