"""How a journal file looks: bytes in, bytes out. Pure; journal.py reads and writes them.

    file    = head block, then records of one size
    record  = head block | token ids, i32 [page_tokens], padded to 4,096 | the page's image, padded to 4,096
    block   = 4,096 bytes: HEAD, then for a file its form (msgpack), zeros, a hash

A record's head is written last, so that a head means that all of its record was written; a hash over the head tells a
torn one. A state is a file of one record whose ids are all those before it. Every head carries the layout fingerprint:
a record of another form, model or version is never taken for one of ours. A page that is void keeps its place: its head
is overwritten by one that says so.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from common.errors import OutriggerError

BLOCK = 4096
"""Images lie at multiples of this many bytes, so that they can be mapped on their own."""
MAGIC = b"OUTRGJ01"
HEAD = struct.Struct("<8sIIII16s16sQQQQ")
"""magic, kind, layer, page, text bytes behind the head, form, key, ids bytes, image bytes, image xxh3, serial."""
HASH = struct.Struct("<Q")
FILE, PAGE, STATE, VOID = 1, 2, 3, 4
assert HEAD.size + HASH.size <= BLOCK


class RecordError(OutriggerError):
    """A block of a journal file is not what it must be; what it describes is not used."""

    code = 702


@dataclass(frozen=True)
class Head:
    """One head block."""

    kind: int
    form: bytes
    key: bytes = bytes(16)
    layer: int = 0
    page: int = 0
    ids_bytes: int = 0
    image_bytes: int = 0
    image_xxh3: int = 0
    serial: int = 0
    """Grows with every record: of two with the same key and layer the later one counts."""
    text: bytes = b""
    """Of a file: its form."""

    @property
    def image_offset(self) -> int:
        """Where the image begins, from the record's beginning."""
        return BLOCK + padded(self.ids_bytes)

    @property
    def record_bytes(self) -> int:
        """Bytes of the whole record."""
        return self.image_offset + padded(self.image_bytes)


def padded(n_bytes: int) -> int:
    """n_bytes, up to the next multiple of a block."""
    return -(-n_bytes // BLOCK) * BLOCK


def encode_head(head: Head) -> bytes:
    """The block of `head`. Raises RecordError when a form is too long for it."""
    if HEAD.size + len(head.text) + HASH.size > BLOCK:
        raise RecordError(f"a form of {len(head.text)} bytes does not fit a block of {BLOCK}")
    sizes = (head.ids_bytes, head.image_bytes, head.image_xxh3, head.serial)
    fields = HEAD.pack(MAGIC, head.kind, head.layer, head.page, len(head.text), head.form, head.key, *sizes)
    body = (fields + head.text).ljust(BLOCK - HASH.size, b"\0")
    return body + HASH.pack(xxhash.xxh3_64_intdigest(body))


def decode_head(block: bytes) -> Head:
    """The head in `block`. Raises RecordError."""
    if len(block) < BLOCK:
        raise RecordError(f"{len(block)} bytes where a block of {BLOCK} belongs: the file was cut off")
    magic, kind, layer, page, text_bytes, *rest = HEAD.unpack_from(block)
    if magic != MAGIC:
        raise RecordError("this is not a head of this version of the journal")
    body = block[: BLOCK - HASH.size]
    if HASH.unpack_from(block, BLOCK - HASH.size)[0] != xxhash.xxh3_64_intdigest(body):
        raise RecordError("a head is damaged: its hash is not that of its bytes")
    form, key, ids_bytes, image_bytes, image_xxh3, serial = rest
    text = block[HEAD.size : HEAD.size + text_bytes]
    return Head(kind, form, key, layer, page, ids_bytes, image_bytes, image_xxh3, serial, text)
