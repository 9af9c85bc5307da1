"""The header of a GGUF file, by libggml's own reader: metadata and the place of every tensor.

Counts are checked before the library sees the file, and every tensor's place is checked against the file's size
afterwards, so that a truncated or damaged file is a ModelError. Knows nothing of architectures; used by common/model.
"""

from __future__ import annotations

import ctypes as C
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelError

from .ffi import MAX_DIMS, GgufInitParams, lib
from .log import complaints, forget_complaints
from .tensor import type_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)
N_TENSORS_MAX = 65_536
N_KEYS_MAX = 65_536
_HEAD = struct.Struct("<4sIqq")
_STRING, _ARRAY = 8, 9
_SCALARS: tuple[Any, ...] = (
    C.c_uint8, C.c_int8, C.c_uint16, C.c_int16, C.c_uint32, C.c_int32, C.c_float, C.c_bool, None, None,
    C.c_uint64, C.c_int64, C.c_double,
)  # fmt: skip
"""ctypes type by enum gguf_type; strings and arrays have their own readers."""


@dataclass(frozen=True)
class StringArray:
    """Stands for a long list of strings (a vocabulary) that was not read: its key has `n` of them."""

    n: int


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` is from the start of the file; shape innermost first, without trailing ones."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of one file. `data_offset` is where tensor data begins."""

    path: Path
    file_bytes: int
    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: str | Path, *, strings: bool = False) -> GgufHeader:
    """Reads the header of a GGUF file. Lists of strings are read only when asked for (vocabularies are long).

    Raises ModelError: missing, not a GGUF file, damaged, truncated.
    """
    path = Path(path)
    file_bytes = _check_head(path)
    forget_complaints()
    context = lib.gguf_init_from_file(os.fsencode(path), GgufInitParams(True, None))
    if not context:
        raise ModelError(f"{path}: damaged GGUF header: {complaints('libggml cannot read it')}")
    try:
        metadata = _read_metadata(context, strings)
        data_offset = lib.gguf_get_data_offset(context)
        tensors = _read_tensors(context, path, data_offset, file_bytes)
        version, alignment = lib.gguf_get_version(context), lib.gguf_get_alignment(context)
    finally:
        lib.gguf_free(context)
    return GgufHeader(path, file_bytes, version, alignment, data_offset, metadata, tensors)


def _check_head(path: Path) -> int:
    """Checks what can be checked before the library allocates by it; returns the file's size."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            file_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    if head[:4] == MAGIC and len(head) < _HEAD.size:
        raise ModelError(
            f"{path}: truncated: a GGUF file has more than {len(head)} bytes; download or copy it again"
        )
    if len(head) < _HEAD.size or head[:4] != MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it begins with {head[:4]!r}, a GGUF file with {MAGIC!r})")
    _, version, n_tensors, n_keys = _HEAD.unpack(head)
    if version not in VERSIONS:
        raise ModelError(f"{path}: GGUF version {version}; supported: {', '.join(map(str, VERSIONS))}")
    if not (0 <= n_tensors <= N_TENSORS_MAX and 0 <= n_keys <= N_KEYS_MAX):
        raise ModelError(f"{path}: damaged header: it claims {n_tensors} tensors and {n_keys} keys")
    return file_bytes


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode("utf-8", "replace")


def _read_metadata(context: int, strings: bool) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(lib.gguf_get_n_kv(context)):
        kind = lib.gguf_get_kv_type(context, i)
        if kind == _STRING:
            value: Any = _text(lib.gguf_get_val_str(context, i))
        elif kind == _ARRAY:
            value = _read_array(context, i, strings)
        else:
            value = _SCALARS[kind].from_address(lib.gguf_get_val_data(context, i)).value
        metadata[_text(lib.gguf_get_key(context, i))] = value
    return metadata


def _read_array(context: int, key: int, strings: bool) -> list[Any] | StringArray:
    n, kind = lib.gguf_get_arr_n(context, key), lib.gguf_get_arr_type(context, key)
    if kind == _STRING:
        return [_text(lib.gguf_get_arr_str(context, key, i)) for i in range(n)] if strings else StringArray(n)
    if n == 0:
        return []
    return list((_SCALARS[kind] * n).from_address(lib.gguf_get_arr_data(context, key)))


def _read_tensors(context: int, path: Path, data_offset: int, file_bytes: int) -> dict[str, TensorInfo]:
    tensors = {}
    for i in range(lib.gguf_get_n_tensors(context)):
        name = _text(lib.gguf_get_tensor_name(context, i))
        ne = list((C.c_int64 * MAX_DIMS).from_address(lib.gguf_get_tensor_ne(context, i)))
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        offset = data_offset + lib.gguf_get_tensor_offset(context, i)
        info = TensorInfo(
            name,
            lib.gguf_get_tensor_type(context, i),
            tuple(ne),
            offset,
            lib.gguf_get_tensor_size(context, i),
        )
        if min(ne) < 1 or offset + info.n_bytes > file_bytes:
            raise ModelError(
                f"{path}: truncated or damaged: tensor {name} ({type_name(info.type)} {ne}) needs bytes {offset} to "
                f"{offset + info.n_bytes}, the file has {file_bytes}; download or copy it again"
            )
        tensors[name] = info
    return tensors
