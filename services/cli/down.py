"""`outrigger down`: ends what runs. What happens is services.launch.background's."""

from __future__ import annotations

import os

import click

from common.config import find_file, load_settings
from services.launch import background


@click.command()
@click.option("--now", is_flag=True, help="Do not wait for answers that are being written.")
def command(now: bool) -> None:
    """Stop what `outrigger up` (or `outrigger run` elsewhere) started with these settings.

    Answers that are being written get gateway.drain_s seconds to end; new requests are refused meanwhile. What does
    not stop is killed.

    \b
    Exit codes: 0 nothing runs any more, 2 a bad setting, 3 something is still there.
    """
    settings = load_settings(find_file(os.environ), os.environ)
    raise SystemExit(background.stop(settings.run_dir, click.echo, now=now))
