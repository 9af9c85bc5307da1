"""`outrigger run`: everything in the foreground. What happens is services.launch's; here are the flags."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from common.config import Settings, find_file, load_settings
from common.errors import SettingError
from services.cli.progress import ByteProgress
from services.launch.launch import launch

OPTIONS = (
    click.option(
        "--model",
        metavar="FILE",
        help="GGUF file to serve.  [the embedded SmolLM2-135M-Instruct]",
    ),
    click.option("--host", "http_host", metavar="ADDRESS", help="Address of the API.  [127.0.0.1]"),
    click.option("--port", "http_port", type=int, help="Port of the API; 0 takes a free one.  [8080]"),
    click.option("--n-ctx", type=int, help="Tokens of context.  [8192]"),
    click.option(
        "--kv-host-tokens",
        type=int,
        help="Tokens whose keys and values stay in memory; older ones go to the journal and to workers.  [65536]",
    ),
    click.option(
        "--threads", type=int, help="Computing threads of the host.  [half of the cores; all without worker]"
    ),
    click.option(
        "--worker-threads", type=int, help="Computing threads of the worker here.  [half of the cores]"
    ),
    click.option("--no-worker", is_flag=True, help="The host alone: no worker, no bridge, all layers here."),
    click.option(
        "--worker-host", metavar="ADDRESS", help="A worker that runs elsewhere, instead of one here."
    ),
    click.option(
        "--page-workers",
        metavar="N|HOST,...",
        help="Further workers that hold old pages: so many here, or where they are.  [none]",
    ),
    click.option(
        "--split-layer", type=int, help="First layer of the worker.  [cycle boundary nearest to 5/8]"
    ),
    click.option(
        "--split-decode",
        flag_value="on",
        default=None,
        help="The host holds the layers before the split only; the worker runs the rest of every token.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Least important event logged.",
    ),
)
"""Flags that `run` and `up` share."""

SPELLED = {"http_host": "--host", "http_port": "--port"}
"""Settings whose flag has a shorter name here."""


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags of OPTIONS."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def settings_of(flags: dict[str, Any]) -> Settings:
    """The settings of this start, from file, environment and these flags."""
    if flags.get("model") == "":
        raise SettingError(
            "--model '' names no file: name a GGUF file, or leave the flag out for the embedded model"
        )
    if flags.pop("no_worker"):
        flags["split"] = "off"
    return load_settings(find_file(os.environ), os.environ, flags, SPELLED)


@click.command()
@run_options
@click.option("--background", is_flag=True, hidden=True, help="Said by `outrigger up`: there is no Ctrl-C.")
def command(background: bool, **flags: Any) -> None:
    """Serve a model over HTTP in the foreground, until Ctrl-C.

    Starts gateway, mac, broker and bridge, and a worker on this machine that runs the last layers of long prompts,
    as a phone at the end of a cable would. Says when all are ready, where it listens, and a request to paste.

    \b
    Exit codes: 0 stopped, 1 the model cannot be used, 2 a bad setting, 3 it runs already or a process did not start.

    \b
    Examples:
      outrigger run
      outrigger run --model qwen.gguf --split-layer 40 --port 9000
      outrigger run --no-worker
      outrigger run --worker-host auto --page-workers 169.254.9.1   a phone, and a spare PC for old pages
    """
    raise SystemExit(
        launch(
            settings_of(flags),
            click.echo,
            lambda: ByteProgress("cutting the worker's part of the model"),
            background=background,
        )
    )
