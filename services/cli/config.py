"""`outrigger config`: every setting with its value, where the value came from, and what it may be."""

from __future__ import annotations

import os
from typing import Any

import click

from common.config import explain_settings, find_file, load_settings

HIDDEN = ("api_key",)


@click.group()
def command() -> None:
    """Show and check settings: file, OUTRIGGER_... variables, defaults."""


@command.command()
def show() -> None:
    """Every setting: value, source, allowed values, and the names it goes by."""
    file = find_file(os.environ)
    click.echo(f"# file: {file or 'none (outrigger.toml here, or OUTRIGGER_CONFIG)'}")
    leaf = None
    for row in explain_settings(file, os.environ):
        if row.key.leaf != leaf:
            leaf = row.key.leaf
            click.echo(f"\n[{leaf}]")
        click.echo(f"{row.key.field} = {_shown(row.key.field, row.value)}")
        click.echo(f"    # {row.key.text}")
        click.echo(f"    # {row.allowed}; {row.key.variable}; from: {row.source}")


@command.command()
def check() -> None:
    """Exit code 0 when the settings can be used, 2 with a sentence when not."""
    file = find_file(os.environ)
    load_settings(file, os.environ)
    click.echo(f"settings are good ({file or 'no file'})")


def _shown(name: str, value: Any) -> str:
    if name in HIDDEN and value:
        return '"<hidden>"'
    if value is None:
        return '"auto"'
    return f'"{value}"' if isinstance(value, str) else str(value)
