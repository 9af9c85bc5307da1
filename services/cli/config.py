"""`outrigger config`: every setting with its value, where the value came from, and what it may be."""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from common.config import Explained, explain_settings, find_file, load_settings
from common.errors import SettingError


@click.group()
def command() -> None:
    """Show and check settings: file, OUTRIGGER_... variables, defaults."""


@command.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a setting, in a list.")
def show(name: str | None, as_json: bool) -> None:
    """Every setting: value, effect, allowed values, where the value came from, and the names it goes by.

    NAME shows one section (host) or one setting (host.n_ctx, n_ctx or OUTRIGGER_N_CTX). What is shown can be put into
    outrigger.toml as it stands. Keys and passwords are never shown.
    """
    file = find_file(os.environ)
    rows = [row for row in explain_settings(file, os.environ) if name is None or name in _names(row)]
    if not rows:
        raise SettingError(f"there is no setting or section {name!r}; `outrigger config show` lists all")
    if as_json:
        click.echo(msgspec.json.encode([_facts(row) for row in rows]).decode())
        return
    click.echo(f"# file: {file or 'none (outrigger.toml here, or OUTRIGGER_CONFIG)'}")
    leaf = None
    for row in rows:
        if row.key.leaf != leaf:
            leaf = row.key.leaf
            click.echo(f"\n[{leaf}]")
        click.echo(f"{row.key.field} = {_shown(row.value)}")
        click.echo(f"    # {row.key.text}")
        click.echo(f"    # {row.allowed}; {row.key.variable}; from: {row.source}{_default(row)}")


@command.command()
def check() -> None:
    """Exit code 0 when the settings can be used, 2 with a sentence when not."""
    file = find_file(os.environ)
    load_settings(file, os.environ)
    click.echo(f"settings are good ({file or 'no file'})")


def _names(row: Explained) -> tuple[str, ...]:
    """What a setting may be asked for by."""
    return (row.key.leaf, row.key.path, row.key.flat, row.key.variable)


def _facts(row: Explained) -> dict[str, Any]:
    return {
        "key": row.key.path,
        "value": row.value,
        "default": row.key.default,
        "effect": row.key.text,
        "allowed": row.allowed,
        "variable": row.key.variable,
        "source": row.source,
    }


def _default(row: Explained) -> str:
    """The default, when the value is another one that somebody gave."""
    given = row.source not in ("default", "worked out")
    return f"; default: {_shown(row.key.default)}" if given and row.key.default not in ("", 0, None) else ""


def _shown(value: Any) -> str:
    if value is None:
        return '"auto"'
    return msgspec.json.encode(value).decode() if isinstance(value, str) else str(value)
