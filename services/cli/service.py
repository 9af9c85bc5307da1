"""`outrigger service install`: Outrigger as a service of this machine, by launchd on a Mac and systemd on Linux."""

from __future__ import annotations

import getpass
import os
import platform
import sys
from pathlib import Path

import click

import services
from common.config import find_file, load_settings
from common.config.keys import KEYS
from services.launch.launch import STOP_S_MAX
from services.launch.service.plan import Kind, Service, install, plan

SPARE_S = 5.0
KNOWN = {key.variable for key in KEYS.values()}


@click.group()
def command() -> None:
    """Serve from the start of the machine on, without a terminal."""


@command.command("install")
@click.option("--dry-run", is_flag=True, help="Show what would be written and run; change nothing.")
@click.option("--kind", type=click.Choice(["launchd", "systemd"]), help="[launchd on a Mac, else systemd]")
def install_command(dry_run: bool, kind: Kind | None) -> None:
    """Write a launchd agent or a systemd user unit that runs `outrigger run` with the settings of now.

    Settings of the environment are written into it, except keys: put api_key into outrigger.toml, readable for
    you alone. The service is not started: the commands that do are told.

    \b
    Exit codes: 0 written (or shown), 1 a file cannot be written, 2 another file is there already, or a bad setting.
    """
    chosen: Kind = kind or ("launchd" if platform.system() == "Darwin" else "systemd")
    planned = plan(chosen, service_of(), Path.home())
    for path, content in planned.files.items():
        click.echo(f"# {path}")
        if dry_run:
            click.echo(content.decode())
    if not dry_run:
        install(planned)
        click.echo("written; now run:")
    for line in planned.commands:
        click.echo(f"  {line}")
    for note in planned.notes:
        click.echo(f"# {note}")


def service_of() -> Service:
    """What is served: this installation, with the settings of now. Raises SettingError."""
    file = find_file(os.environ)
    settings = load_settings(file, os.environ)
    root = Path(services.__file__).parents[1]
    environ = {
        "OUTRIGGER_RUN_DIR": str(settings.run_dir),
        "OUTRIGGER_DATA_DIR": str(settings.data_dir.absolute()),
        "OUTRIGGER_JOURNAL_DIR": str(Path(settings.broker.journal_dir).absolute()),
    }
    if file:
        environ["OUTRIGGER_CONFIG"] = str(Path(file).absolute())
    for name, value in os.environ.items():
        if name in KNOWN and "KEY" not in name and "SECRET" not in name:
            environ.setdefault(name, value)
    return Service(
        (sys.executable, "-m", "services.cli.main", "run", "--background"),
        root,
        environ,
        settings.data_dir.absolute() / "outrigger.log",
        settings.gateway.drain_s + STOP_S_MAX + SPARE_S,
        getpass.getuser(),
    )
