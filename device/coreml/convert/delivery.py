"""Takes a bundle to a folder (a mounted device, a disk) so that what arrives is what left, and checks it again later.

Copies fail in ways that say nothing: an empty file where a large one should be is the published one. So every file is
hashed before it leaves and read back after it arrived. A push that was interrupted goes on: right files are kept, a
file that arrived in part is compared and continued. What was delivered is written beside it (delivery.json), so that
`check` needs no source. Knows no devices: those are services.cli.phone_files'. Called by services.cli.bundle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import PackageError, SettingError
from device.coreml.convert.manifest import FILE_NAME as MANIFEST
from device.coreml.convert.manifest import Manifest, sha256, wrong_files

RECORD, FORMAT = "delivery.json", 1
PARTIAL = ".arriving"
BLOCK_BYTES = 4 << 20
Files = dict[str, list[Any]]
"""path from the bundle -> [bytes, sha256], as in a manifest."""


@dataclass(frozen=True)
class Delivered:
    """What a push did: files copied, files that were there already, bytes written."""

    n_copied: int
    n_kept: int
    n_bytes: int


def contents(bundle: Path, packages: bool | None = None) -> Files:
    """The files to deliver with sizes and hashes. Raises PackageError where the bundle itself is not in order.

    `.mlpackage` folders stay behind where each has its compiled `.mlmodelc` (None), always (False) or never (True).
    """
    manifest = Manifest.read(bundle)
    known = manifest.others | {name: record for part in manifest.parts for name, record in part.files.items()}
    if packages is None:
        packages = not all(
            (bundle / part.package).with_suffix(".mlmodelc").is_dir() for part in manifest.parts
        )
    names = [path.relative_to(bundle).as_posix() for path in sorted(bundle.rglob("*")) if path.is_file()]
    names = [name for name in names if _belongs(name, packages)]
    wanted = {name: record for name, record in known.items() if _belongs(name, packages)}
    wrong = wrong_files(wanted, bundle)
    files = {
        name: known[name] if name in known else [(bundle / name).stat().st_size, sha256(bundle / name)]
        for name in names
    }
    wrong += [f"{name} is empty" for name, (size, _) in files.items() if not size and name not in wanted]
    if wrong:
        raise PackageError(f"{bundle}: not as it was made, nothing is copied: {'; '.join(wrong)}")
    return files


def _belongs(name: str, packages: bool) -> bool:
    first = name.partition("/")[0]
    if first.startswith(".") or name == RECORD:
        return False
    return packages or not first.endswith(".mlpackage")


def push(bundle: Path, folder: Path, files: Files, told: Callable[[str, int], None]) -> Delivered:
    """Copy `files` into `folder` and check each on arrival; `told` gets every copied file's name and size.

    Raises SettingError when they do not fit, PackageError naming a file that did not arrive whole.
    """
    if folder.resolve().is_relative_to(bundle.resolve()):
        raise SettingError(f"{folder}: lies in the bundle itself; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: record for name, record in files.items() if wrong_files({name: record}, folder)}
    wanted, free = sum(size for size, _ in missing.values()), shutil.disk_usage(folder).free
    arrived = sum(path.stat().st_size for path in folder.rglob(f"*{PARTIAL}"))
    if wanted - arrived > free:
        raise SettingError(
            f"{folder}: {free / 1e6:,.0f} MB free, {(wanted - arrived) / 1e6:,.0f} MB are needed"
        )
    for name, (size, digest) in missing.items():
        copy_file(bundle / name, folder / name, size, digest)
        told(name, size)
    write_record(folder, files)
    return Delivered(len(missing), len(files) - len(missing), wanted)


def copy_file(source: Path, target: Path, size: int, digest: str) -> None:
    """Copy, going on where an earlier copy stopped; then read it back. Raises PackageError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + PARTIAL)
    with source.open("rb") as reader, partial.open("r+b" if partial.exists() else "w+b") as writer:
        at = _common_length(reader, writer)
        reader.seek(at)
        writer.seek(at)
        writer.truncate()
        shutil.copyfileobj(reader, writer, BLOCK_BYTES)
        writer.flush()
        os.fsync(writer.fileno())
        _forget(writer.fileno())
    found = partial.stat().st_size
    if found != size or sha256(partial) != digest:
        partial.unlink()
        what = (
            "arrived empty"
            if not found
            else f"arrived with {found} bytes, not {size}"
            if found != size
            else "differs"
        )
        raise PackageError(
            f"{target}: {what} from what was sent; is the disk or the cable in order? push again"
        )
    partial.replace(target)


def _common_length(reader: Any, writer: Any) -> int:
    """How many bytes of an earlier, unfinished copy are right."""
    at = 0
    while True:
        ours, theirs = reader.read(BLOCK_BYTES), writer.read(BLOCK_BYTES)
        if not theirs or ours[: len(theirs)] != theirs:
            return at
        at += len(theirs)


def _forget(descriptor: int) -> None:
    """Ask the system to drop its copy, so that reading back reads the medium; where it can be asked."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_record(folder: Path, files: Files) -> None:
    """Say in the folder what was delivered."""
    text = json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"
    (folder / RECORD).write_text(text, encoding="utf-8")


def check(folder: Path) -> tuple[int, list[str], list[str]]:
    """(files expected, what is wrong, what does not belong) of a delivered folder, or of a bundle as it was made.

    Raises PackageError where neither record is there.
    """
    files = expected(folder)
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    wrong = wrong_files(files, folder)
    wrong = [each.replace(" has 0 bytes", " is empty: 0 bytes") for each in wrong]
    strangers = sorted(name for name in names - set(files) - {RECORD, MANIFEST} if ".mlmodelc/" not in name)
    return len(files), wrong, strangers


def expected(folder: Path) -> Files:
    """What should be there: what was delivered, else the manifest's."""
    path = folder / RECORD
    if not path.exists():
        manifest = Manifest.read(folder)
        return manifest.others | {name: each for part in manifest.parts for name, each in part.files.items()}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise PackageError(f"{path}: written by another version; push again")
        return {str(name): [int(size), str(digest)] for name, (size, digest) in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackageError(f"{path}: not a record of a delivery: {error!r}; push again") from error
