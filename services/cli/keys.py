"""`outrigger keys`: CURVE key pairs for ZeroMQ beyond this machine. What they are for is docs/zeromq.md's."""

from __future__ import annotations

import os
from pathlib import Path

import click

from common.errors import SettingError
from services.runtime.bus import new_key_pair


@click.group()
def command() -> None:
    """CURVE keys, for ZeroMQ clients on other machines."""


@command.command()
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where to put the files.  [here]",
)
def new(name: str, folder: Path) -> None:
    """Make a key pair: NAME.secret, which stays where it is, and NAME.public, for the other side.

    \b
    Example, one pair for each side:
      outrigger keys new gateway --folder ~/.outrigger-keys
      outrigger keys new laptop --folder ~/.outrigger-keys
    """
    if not name or Path(name).name != name or name.startswith("."):
        raise SettingError(f"name = {name!r}: use a plain file name; --folder says where")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = new_key_pair()
    for ending, key in (("secret", secret), ("public", public)):
        click.echo(_write(folder / f"{name}.{ending}", key))


def _write(path: Path, key: bytes) -> Path:
    """One key in a file that only its owner reads. A file that is there is never replaced. Raises SettingError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SettingError(f"{path} is there already; choose another name, or remove it first") from None
    except OSError as error:
        raise SettingError(f"cannot write {path}: {error.strerror}") from error
    with open(fd, "wb") as file:
        os.fchmod(fd, 0o600)
        file.write(key + b"\n")
    return path
