"""`outrigger up`: everything in the background. What happens is services.launch.background's."""

from __future__ import annotations

from typing import Any

import click

from services.cli.run import run_options, settings_of
from services.launch import background


@click.command()
@run_options
def command(**flags: Any) -> None:
    """Serve in the background: as `outrigger run`, until `outrigger down`.

    Returns when all processes are ready, and says where they listen. A crash is repaired, as told by
    `outrigger status`.

    \b
    Exit codes: 0 it serves, 1 the model cannot be used, 2 a bad setting, 3 it runs already or did not start.

    \b
    Examples:
      outrigger up
      outrigger up --model qwen.gguf --port 9000
    """
    raise SystemExit(background.start(settings_of(flags), click.echo))
