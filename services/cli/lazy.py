"""A click group that imports a subcommand only when it is called, so that `outrigger --help` stays instant.

Knows nothing of what the commands do. Used by services.cli.main and services.cli.bench.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """`commands_at` maps a command's name to ("package.module:attribute", one line of help)."""

    def __init__(self, *args: Any, commands_at: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands_at = commands_at

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.commands_at)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands_at:
            return None
        module, _, attribute = self.commands_at[cmd_name][0].partition(":")
        return getattr(import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of --help, from the one-liners, importing nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands_at[name][1]) for name in self.list_commands(ctx)])
