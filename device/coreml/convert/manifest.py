"""manifest.json of a bundle: what it holds, file by file, with sizes and hashes; and which parts are finished.

It is what makes a conversion resumable (a part whose key and files are right is not made again), what a copy is checked
against, and what the interpreter's conversation and the lint open a bundle by.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from common.errors import PackageError

FILE_NAME, FORMAT = "manifest.json", 1
READ_BYTES = 1 << 22


@dataclass
class PartRecord:
    """A finished part: `key` says from what it was made, `files` path (from the bundle) -> [bytes, sha256]."""

    kind: str
    package: str
    key: str
    layers: list[int]
    functions: list[str]
    n_weights: int
    palette_error: float
    seconds: float
    files: dict[str, list[Any]]

    @property
    def n_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


@dataclass
class Manifest:
    """A bundle's description. `model` and `options` are plain values, as the converter was given them."""

    model: dict[str, Any]
    options: dict[str, Any]
    parts: list[PartRecord] = field(default_factory=list)
    others: dict[str, list[Any]] = field(default_factory=dict)
    """meta.yaml, tokenizer and the like: path -> [bytes, sha256]."""

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises PackageError where there is none, or it is not one of ours."""
        path = folder / FILE_NAME
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise PackageError(f"{path}: written by another version of the converter")
            names = {each.name for each in fields(PartRecord)}
            parts = [
                PartRecord(**{k: v for k, v in part.items() if k in names}) for part in content.pop("parts")
            ]
            return cls(**content, parts=parts)
        except OSError as error:
            raise PackageError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PackageError(f"{path}: not a bundle's manifest: {error!r}") from error

    def write(self, folder: Path) -> None:
        """Whole or not at all."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        unfinished = folder / f".{FILE_NAME}.{os.getpid()}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / FILE_NAME)

    def finished(self, key: str, folder: Path) -> PartRecord | None:
        """The record made under `key`, if its files still have their sizes and hashes."""
        for part in self.parts:
            if part.key == key and not wrong_files(part.files, folder):
                return part
        return None


def file_records(folder: Path, paths: Iterable[Path]) -> dict[str, list[Any]]:
    """path relative to `folder` -> [bytes, sha256] of files, and of the files below folders."""
    found: dict[str, list[Any]] = {}
    for path in sorted(paths):
        files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        for file in files:
            found[file.relative_to(folder).as_posix()] = [file.stat().st_size, sha256(file)]
    return found


def wrong_files(files: dict[str, list[Any]], folder: Path) -> list[str]:
    """Which files are missing, of another size (copies that failed are often empty), or of other content."""
    wrong = []
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif path.stat().st_size != size:
            wrong.append(f"{name} has {path.stat().st_size} bytes, not {size}")
        elif sha256(path) != digest:
            wrong.append(f"{name} has another content than when it was made")
    return wrong


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
