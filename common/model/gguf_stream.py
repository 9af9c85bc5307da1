"""A GGUF file written as a stream: header first, then tensor after tensor in blocks, then renamed into place.

The metadata and the tensor table are packed by the `gguf` package; the data never passes through memory as a whole.
Readers see the old file or the new one, never half of one. Knows nothing of architectures.
Called by common.model.synthetic and common.model.split.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from common.errors import ModelError
from common.limits import MIB

ALIGNMENT_BYTES = 32
DISK_RESERVE_BYTES = 64 * MIB
"""Left free on the disk after the file is written."""

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all) of tensor data."""


class GgufStream:
    """`with GgufStream(...) as file: file.add_key(...); file.declare(...); file.begin(); file.write(blocks) …`

    `write` is called once a declared tensor, in the order of declaration. Leaving the block normally after the
    last tensor renames the file into place; leaving it by an exception, or too early, removes it.
    """

    def __init__(
        self,
        out: Path,
        architecture: str,
        progress: Progress | None = None,
        sink: BinaryIO | None = None,
    ) -> None:
        """sink: write there instead, in order, without looking back; `out` then only names a folder for the header."""
        self.out = out
        self._sink = sink
        self._part = out.with_name(f".{out.name}.{os.getpid()}.part")
        self._header = GGUFWriter(None, architecture)
        self._progress = progress
        self._sizes: list[tuple[str, int]] = []  # (name, bytes) as declared
        self._written = 0  # tensors
        self._data_bytes = 0
        self._file: BinaryIO | None = None

    @property
    def data_bytes_total(self) -> int:
        return sum(n_bytes for _, n_bytes in self._sizes)

    def add_key(self, key: str, value: Any) -> None:
        """One metadata entry, stored with the type that llama.cpp asks for: whole numbers as u32, lists of them as
        i32, fractions as f32."""
        if isinstance(value, list):
            self._header.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=_item_type(key, value))
        else:
            self._header.add_key_value(key, value, _scalar_type(key, value))

    def declare(self, name: str, shape: tuple[int, ...], ggml_type: int, n_bytes: int) -> None:
        """One tensor of the table. `shape` is NumPy's order (rows first); ggml's is the reverse."""
        # the dtype argument is ignored when raw_dtype is given, but must not be uint8
        self._header.add_tensor_info(
            name, shape, np.dtype(np.float32), n_bytes, raw_dtype=GGMLQuantizationType(ggml_type)
        )
        self._sizes.append((name, n_bytes))

    def begin(self) -> None:
        """Checks the disk and writes everything before the tensor data. Raises ModelError when it does not fit."""
        folder = self.out.absolute().parent
        if not folder.is_dir():
            raise ModelError(f"cannot write {self.out}: the folder {folder} does not exist")
        needed = (0 if self._sink else self.data_bytes_total) + DISK_RESERVE_BYTES
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise ModelError(
                f"cannot write {self.out}: {needed / MIB:.0f} MiB needed (with a reserve of "
                f"{DISK_RESERVE_BYTES / MIB:.0f} MiB), {free / MIB:.0f} MiB free in {folder}; free some space or "
                f"choose another folder"
            )
        self._header.write_header_to_file(self._part)
        self._header.write_kv_data_to_file()
        self._header.write_ti_data_to_file()
        self._header.close()
        if self._sink is None:
            self._file = open(self._part, "ab")  # noqa: SIM115  closed by __exit__
        else:
            self._file = self._sink
            self._sink.write(self._part.read_bytes())
        self._pad(self._part.stat().st_size)

    def write(self, blocks: Iterable[memoryview | bytes]) -> None:
        """The data of the next declared tensor, as buffers one after the other."""
        assert self._file is not None, "begin() comes first"
        name, expected = self._sizes[self._written]
        written = 0
        for block in blocks:
            self._file.write(block)
            written += memoryview(block).nbytes
            if self._progress is not None:
                self._progress(self._data_bytes + written, self.data_bytes_total)
        if written != expected:
            raise ModelError(f"{self.out}: tensor {name} was given {written} bytes, {expected} were declared")
        self._pad(written)
        self._data_bytes += written
        self._written += 1

    def _pad(self, n_bytes: int) -> None:
        assert self._file is not None
        self._file.write(bytes(-n_bytes % ALIGNMENT_BYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        complete = error is None and self._file is not None and self._written == len(self._sizes)
        try:
            if self._sink is not None:
                self._sink.flush()
            elif self._file is not None:
                if complete:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                self._file.close()
            if complete and self._sink is None:
                os.replace(self._part, self.out)
        finally:
            # A read-only folder refuses even this; the first error is the one to tell.
            with suppress(OSError):
                self._part.unlink(missing_ok=True)
        if error is None and not complete:
            raise ModelError(
                f"{self.out}: {self._written} of {len(self._sizes)} declared tensors were written"
            )


def _scalar_type(key: str, value: Any) -> GGUFValueType:
    match value:
        case bool():
            return GGUFValueType.BOOL
        case int() if 0 <= value < 1 << 32:
            return GGUFValueType.UINT32
        case int():
            return GGUFValueType.INT64
        case float():
            return GGUFValueType.FLOAT32
        case str():
            return GGUFValueType.STRING
    raise TypeError(f"{key}: GGUF metadata cannot hold {type(value).__name__}")


def _item_type(key: str, values: list[Any]) -> GGUFValueType:
    if not values:
        return GGUFValueType.INT32
    kind = _scalar_type(key, values[0])
    return GGUFValueType.INT32 if kind in (GGUFValueType.UINT32, GGUFValueType.INT64) else kind
