"""The worker process: serves the last layers of a model, and memory for old pages, to one host at the end of a cable.

    outrigger worker --model tail.gguf            or: python -m device.worker --model tail.gguf

Wires the parts together and says when it is ready; every part lives in its own file (life, mirror, service, compute,
session, link_server, control; for pages page_port). The control channel answers from the first moment, the others once
the model is loaded. With `--pages-only` there is no model.
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
from common.crash_note import Slot
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
from device.page_port import PagePort
from device.service import TailService, Terms
from device.tail_fetch import TailFetch, parse_source

TAILS_FOLDER = "tails"
FROZEN_FOLDER = "frozen"
TELL_EVERY_S = 2.0
PAGES_STOP_S = 0.3
COMPUTE_STOP_S = 0.9
"""How long a stop waits for the chunk at hand; after that life leaves without it."""


class Worker:
    """One worker: its listening sockets and, if it has a model, one engine. Made when it listens; `start` serves."""

    def __init__(self, settings: WorkerSettings, life: Life, folder: Path) -> None:
        """folder: of page programs."""
        self.has_tail = settings.pages != "only"
        if self.has_tail and not settings.model:
            raise SettingError(
                "worker.model is not given: name a tail file, or a whole model (--model FILE); a worker that only "
                "holds pages needs none (--pages-only)"
            )
        check_address(settings.host)
        self._settings, self._life = settings, life
        self.link_listener = listen(settings.host, settings.port) if self.has_tail else None
        self.stand_in = StandIn(settings) if settings.emulate or settings.faults else None
        self._machine: Facts = self.stand_in or facts
        more = self.stand_in.commands() if self.stand_in else {}
        files = [Path(settings.model)] if self.has_tail else []
        control = Control(self.mem, files, self.life, machine=self._machine, more=more)
        self.control = ControlServer(listen(settings.host, settings.control_port), control)
        self.link: LinkServer | None = None
        self.pages: PagePort | None = None
        if settings.pages != "off":
            self.pages = PagePort(settings, self._machine, self.stand_in, folder, self.control.notify)
        self.served = False

    def start(self) -> None:
        """Load the model; return once all channels are served. Raises ModelError or EngineError."""
        settings, slot = self._settings, self._life.crash_slot()
        self.control.start()
        slot.write("checking the build")
        check_first_start()
        device = f"{self._machine.machine()}, {settings.n_threads} threads"
        terms = Terms(secrets.randbits(63), device, window=CHUNK_WINDOW_MAX)
        if self.has_tail:
            self._start_tail(terms, slot)
        slot.clear()
        if self.pages is not None:
            self.pages.start(terms, self._life.crash_slot())
        if self.stand_in is not None:
            desk = self.pages.desk if self.pages else None
            self.stand_in.start(self.service if self.has_tail else None, desk, self.control.notify)
        self.served = True

    def _start_tail(self, terms: Terms, slot: Slot) -> None:
        settings = self._settings
        assert self.link_listener is not None, "it listens for hosts"
        slot.write(f"loading {settings.model}")
        self.engine = Engine.load(
            settings.model, n_ctx=settings.n_ctx, n_threads=settings.n_threads, weights=settings.weights
        )
        slot.clear()
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

    @property
    def _serving_tail(self) -> bool:
        return self.link is not None and self.link.serving is not None

    @property
    def serving(self) -> bool:
        """Whether a host is attached to any channel."""
        return self._serving_tail or (self.pages is not None and self.pages.serving)

    def mem(self) -> dict[str, Any]:
        """What `mem` tells of the tail and of the pages."""
        if not self.served:
            return {"state": "starting", "tail_state": "no host", "tail_chunks": 0}
        computing = "computing" if self.has_tail and self.compute.busy else "idle"
        told = self.stand_in.state if self.stand_in else ""
        return {
            "state": told or ("serving" if self.serving else "ready"),
            "tail_state": computing if self._serving_tail else "no host",
            "tail_chunks": self.service.n_chunks if self.has_tail else 0,
            **(self.pages.told() if self.pages else {}),
        }

    def life(self) -> dict[str, Any]:
        """The answer to `life`: how far the process is, and that its threads take turns."""
        state: str = self._life.state
        if state == "ready" and self.serving:
            state = "serving"
        listening = state != "draining"
        return {
            "process": PROCESS,
            "pid": os.getpid(),
            "state": state,
            "beat": self._beat if self.served else 0,
            "link": _named(self.link_listener.getsockname() if self.link_listener and listening else ("", 0)),
            "pages": _named(self.pages.address if self.pages and listening else ("", 0)),
        }

    @property
    def _beat(self) -> int:
        if self.has_tail:
            return self.compute.beat
        assert self.pages is not None, "a worker without a tail has pages"
        return self.pages.desk.beat

    @property
    def ready_line(self) -> str:
        """What the worker serves and where."""
        control, pages = self.control.address[1], self.pages.address if self.pages else None
        if self.link is None:
            assert pages is not None, "a worker without a tail has pages"
            return f"worker ready: pages only, pages {pages[1]}, {_named(pages)}, control {control}"
        spec = self.engine.spec
        layers = f"layers {spec.layers.start}-{spec.layers.stop - 1} of {spec.arch} ({spec.name})"
        also = f", pages {pages[1]}" if pages else ""
        return f"worker ready: {layers}{also}, {_named(self.link.address)}, control {control}"

    def stop(self) -> None:
        """End clients and threads."""
        self.control.announce_stop()
        if self.link is not None:
            self.link.stop()
        if self.pages is not None:
            self.pages.stop(PAGES_STOP_S)
        ended = self.link is not None and self.compute.stop(COMPUTE_STOP_S)
        self.control.stop(0.3)
        if ended:
            self.engine.close()


def _named(address: tuple[Any, ...]) -> str:
    return f"{address[0]}:{address[1]}"


def with_tail(settings: Settings, life: Life, announce: Callable[[str], None]) -> WorkerSettings:
    """The worker's settings with a tail file that is here: fetched from the bridge when they name one (--from)."""
    worker = settings.worker
    if not worker.source or worker.pages == "only":
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
        folder = settings.data_dir / FROZEN_FOLDER
        worker = Worker(with_tail(settings, life, announce), life, folder)
        worker.start()
        life.ready(engine=worker.engine.describe() if worker.has_tail else "none: pages only")
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
@click.option("--pages-port", "listen_pages_port", type=int, help="Port for pages.  [residual port + 2]")
@click.option(
    "--pages-only", "worker_pages", flag_value="only", help="Hold pages for a long context; needs no model."
)
@click.option("--hold-mib", type=int, help="Memory that held pages may take.  [half of what is free]")
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
    """Serve the last layers of a model, and memory for long contexts, to a host at the other end of a cable.

    Runs in the foreground until Ctrl-C. Any machine with this command can be a worker; a tail file is written by
    `outrigger split`. Only this machine and link-local addresses may connect.
    """
    try:
        spelled = {each.name: each.opts[0] for each in command.params if each.name}
        settings = load_settings(find_file(os.environ), os.environ, flags, spelled)
        code = serve(settings, lambda line: print(line, flush=True))
    except OutriggerError as error:
        if isinstance(error, SettingError):
            click.echo(f"Error: {error}", err=True)
            raise SystemExit(EXIT_SETTING) from error
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)


if __name__ == "__main__":
    command()
