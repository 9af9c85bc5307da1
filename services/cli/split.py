"""`outrigger split`: writes the worker's tail file, streams it to a pipe, or serves it to a worker at the cable.

Cutting is common.model.split's, serving services.bridge.tail_server's.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path

import click

from common.config import BridgeSettings
from common.errors import SettingError
from common.model.spec import ModelSpec
from common.model.split import SplitPlan, plan_split, write_tail
from services.bridge.tail_server import TailServer
from services.cli.progress import ByteProgress

PIPE = "-"


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@click.option(
    "-L",
    "--layer",
    type=int,
    help="First layer of the tail.  [the boundary of the layer cycle nearest to 5/8 of the layers]",
)
@click.option(
    "--no-head",
    is_flag=True,
    help="Leave the output out: the host computes the logits. Stock cannot load it.",
)
@click.option(
    "--serve",
    metavar="ADDRESS[:PORT]",
    help="Then hand it to workers (`outrigger worker --from`) until Ctrl-C. ADDRESS is this machine's on the cable.",
)
def command(model: Path, out: Path, layer: int | None, no_head: bool, serve: str | None) -> None:
    """Write the last layers of MODEL to the file OUT, for the worker; OUT - is standard output, a pipe.

    MODEL may itself be such a tail: layers are always numbered as in the whole model.
    """
    plan = plan_split(ModelSpec.read(model), layer, any_layer=True)
    if str(out) == PIPE:
        if serve is not None:
            raise SettingError("--serve needs a file to serve: name OUT instead of -")
        _stream(model, plan, head=not no_head)
        return
    where = serve_address(serve) if serve is not None else None
    with ByteProgress(f"writing {out}") as progress:
        write_tail(model, plan.layer, out, head=not no_head, progress=progress)
    click.echo(
        f"{out}: layers {plan.layer} to {plan.n_layer_full - 1} of {plan.n_layer_full}"
        f"{'' if no_head else ' and the output'}, {out.stat().st_size / 1e6:.1f} MB"
    )
    if not plan.on_boundary:
        click.echo(
            f"note: {plan.layer} lies inside a cycle of {plan.cycle} layers; Outrigger's own worker runs this, a "
            f"worker that speaks only the base protocol needs a multiple of {plan.cycle}",
            err=True,
        )
    if where is not None:
        asyncio.run(_serve(out, *where))


def _stream(model: Path, plan: SplitPlan, *, head: bool) -> None:
    """The tail to standard output, as it is cut. Refuses a terminal."""
    if sys.stdout.isatty():
        raise SettingError("OUT is - and standard output is a terminal; pipe it somewhere, or name a file")
    with tempfile.TemporaryDirectory(prefix="outrigger-") as folder:
        write_tail(model, plan.layer, Path(folder) / "tail.gguf", head=head, sink=sys.stdout.buffer)


def serve_address(text: str) -> tuple[str, int]:
    """ADDRESS or ADDRESS:PORT. Raises SettingError."""
    host, colon, port = text.partition(":")
    if not host or (colon and not (port.isdigit() and int(port) < 65_536)):
        raise SettingError(f"--serve {text!r}: write ADDRESS or ADDRESS:PORT, with a port up to 65535")
    return host, int(port) if colon else BridgeSettings().tail_port


async def _serve(file: Path, host: str, port: int) -> None:
    """Hand the file out until SIGINT or SIGTERM."""
    server, stopping = TailServer(file, host, port), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await server.start()
    click.echo("serving it: outrigger worker --from {}:{}".format(*server.address))
    await stopping.wait()
    await server.close()
