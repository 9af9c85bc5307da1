"""What both ends say of a tail file that is handed over: its size, a hash of each block, and one hash of all of them.

The bridge makes a `Manifest` of the file it serves, the worker compares every block with it as it comes. Opens files
and nothing else; HTTP is services.bridge.tail_server's and device.tail_fetch's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from common.errors import ModelError, RemoteProtocolError
from common.limits import MIB, TAIL_BLOCKS_MAX, TAIL_BYTES_MAX

BLOCK_BYTES = 4 * MIB
MANIFEST_PATH, FILE_PATH = "/tail", "/tail/file"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
_BLOCK, _WHOLE = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file in blocks of `block_bytes`, the last one shorter.

    blocks: xxh3-128 of each; whole: BLAKE2b-256 of size and blocks; both in hex.
    """

    name: str
    n_bytes: int
    block_bytes: int
    blocks: tuple[str, ...]
    whole: str

    def span(self, block: int) -> tuple[int, int]:
        """(first byte, byte after the last) of a block."""
        return block * self.block_bytes, min(self.n_bytes, (block + 1) * self.block_bytes)

    def holds(self, block: int, data: bytes | memoryview) -> bool:
        """Whether these bytes are that block."""
        return block_digest(data) == self.blocks[block]


def block_digest(data: bytes | memoryview) -> str:
    """xxh3-128 of a block, in hex."""
    return xxhash.xxh3_128(data).hexdigest()


def whole_digest(n_bytes: int, blocks: tuple[str, ...]) -> str:
    """BLAKE2b-256 over the size and all block hashes, in hex."""
    text = "\n".join((str(n_bytes), *blocks))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def manifest_of(path: Path, progress: Progress | None = None) -> Manifest:
    """Read the whole file. Raises ModelError when it cannot be read."""
    blocks = []
    try:
        n_bytes = path.stat().st_size
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                blocks.append(block_digest(block))
                if progress is not None:
                    progress(min(n_bytes, len(blocks) * BLOCK_BYTES), n_bytes)
    except OSError as error:
        raise ModelError(f"cannot read the tail file {path}: {error.strerror}") from error
    digests = tuple(blocks)
    return Manifest(path.name, n_bytes, BLOCK_BYTES, digests, whole_digest(n_bytes, digests))


def parse_manifest(text: bytes) -> Manifest:
    """A manifest that came over the cable. Raises RemoteProtocolError unless every number in it makes sense."""
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"the tail's manifest is not understood: {error}") from None
    complaint = _complaint(manifest)
    if complaint:
        raise RemoteProtocolError(f"the tail's manifest makes no sense: {complaint}")
    return manifest


def _complaint(manifest: Manifest) -> str:
    if not 0 < manifest.n_bytes <= TAIL_BYTES_MAX or not MIB <= manifest.block_bytes <= 64 * MIB:
        return f"{manifest.n_bytes} bytes in blocks of {manifest.block_bytes}"
    expected = -(-manifest.n_bytes // manifest.block_bytes)
    if len(manifest.blocks) != expected or expected > TAIL_BLOCKS_MAX:
        return f"{len(manifest.blocks)} blocks, expected {expected} (at most {TAIL_BLOCKS_MAX})"
    if not _NAME.fullmatch(manifest.name):
        return f"its name is {manifest.name[:40]!r}"
    if not all(map(_BLOCK.fullmatch, manifest.blocks)) or not _WHOLE.fullmatch(manifest.whole):
        return "a hash is not hexadecimal"
    if manifest.whole != whole_digest(manifest.n_bytes, manifest.blocks):
        return "the hash of all blocks is wrong"
    return ""
