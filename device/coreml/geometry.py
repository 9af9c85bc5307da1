"""The shape of a page program, and what follows from it: chunks, constants, bounds of the hardware.

A page is cut into chunks of keys so that sums stay short enough for an fp16 accumulator; each chunk has its own
maximum, sum and output. Decided here once, so that template, writer and caller agree without asking each other.
Knows no coremltools and no files. Called by page_program, template, page_rows, and everything above them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import SettingError

PAGE_TOKENS = 16_384
"""Keys of a product page: one group of four KV pages."""
PAGE_TOKENS_STEP = 256
PAGE_TOKENS_MAX = 65_536
CHUNK_TOKENS = 1024
GAIN = 256.0
"""Outputs are multiplied by this before the V convolution, so that small weights stay above fp16's subnormals."""
N_HEAD_KV_MAX = 256
HEAD_DIM_MAX = 1024
N_ROWS_MAX = 1024
F16_MAX = 65_504.0
CHANNELS_MAX = 65_536
"""Most channels of one tensor on the Neural Engine."""
WEIGHT_BYTES_MAX = 1_000_000_000
"""Larger weight files convert, load, and answer nonsense on iOS."""
MASKED = -60_000.0
"""Bias of a key that is not there: its weight is exp(-60000) = 0, and the sum with any score stays finite in fp16."""
NAME = re.compile(r"page-h(\d{1,9})-k(\d{1,9})-v(\d{1,9})-r(\d{1,9})-t(\d{1,9})-c(\d{1,9})")
NAME_EXAMPLE = "page-h4-k256-v256-r48-t16384-c1024"


@dataclass(frozen=True)
class PageGeometry:
    """Shape of one page program. `n_rows` are query rows a KV head (query heads of the group times tokens).

    Raises:
        SettingError: with the value and the range where a number is out of bounds.
    """

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    n_rows: int
    page_tokens: int = PAGE_TOKENS
    chunk_tokens: int = 0
    """0: the largest multiple of 256 up to 1,024 that divides the page."""

    def __post_init__(self) -> None:
        for name, value, most in (
            ("n_head_kv", self.n_head_kv, N_HEAD_KV_MAX),
            ("head_dim_k", self.head_dim_k, HEAD_DIM_MAX),
            ("head_dim_v", self.head_dim_v, HEAD_DIM_MAX),
            ("n_rows", self.n_rows, N_ROWS_MAX),
        ):
            if not 1 <= value <= most:
                raise SettingError(f"{name} = {value}: a page program takes 1 to {most}")
        for name, value in (("page_tokens", self.page_tokens), ("chunk_tokens", self._chunk())):
            if value % PAGE_TOKENS_STEP or not PAGE_TOKENS_STEP <= value <= PAGE_TOKENS_MAX:
                raise SettingError(
                    f"{name} = {value}: use a multiple of {PAGE_TOKENS_STEP} up to {PAGE_TOKENS_MAX}"
                )
        object.__setattr__(self, "chunk_tokens", self._chunk())
        if self.page_tokens % self.chunk_tokens:
            raise SettingError(
                f"chunk_tokens = {self.chunk_tokens} does not divide page_tokens = {self.page_tokens}"
            )
        self._check_hardware()

    def _chunk(self) -> int:
        if self.chunk_tokens:
            return self.chunk_tokens
        sizes = range(CHUNK_TOKENS, 0, -PAGE_TOKENS_STEP)
        return next((size for size in sizes if self.page_tokens % size == 0), PAGE_TOKENS_STEP)

    def _check_hardware(self) -> None:
        channels = max(self.n_partials * self.head_dim_v, self.n_head_kv * (self.head_dim_k + 1))
        if channels > CHANNELS_MAX:
            raise SettingError(
                f"{self}: an output of {channels} channels; the Neural Engine takes {CHANNELS_MAX}. "
                "Use larger chunks or smaller pages"
            )
        if self.weight_bytes > WEIGHT_BYTES_MAX:
            raise SettingError(
                f"{self}: {self.weight_bytes} bytes of constants; a program takes {WEIGHT_BYTES_MAX}. "
                "Use smaller pages"
            )

    @property
    def n_chunks(self) -> int:
        return self.page_tokens // self.chunk_tokens

    @property
    def n_partials(self) -> int:
        """Partial results the program returns: one per head and chunk."""
        return self.n_head_kv * self.n_chunks

    @property
    def headroom(self) -> int:
        """Exponentials are e^headroom at most, not 1: as large as a chunk of equal scores can be summed in fp16.

        It moves what subnormal flushing takes away from weights below e^-9.7 to weights below e^-(9.7 + headroom).
        A whole number, so that maximum - headroom is exact; 0.1 is kept for where it is not (maxima below -128).
        """
        return math.floor(math.log(F16_MAX / self.chunk_tokens) - 0.1)

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        """Input `queries`: per head head_dim_k channels of the scaled query, then one of minus the centre."""
        return (1, self.n_head_kv * (self.head_dim_k + 1), 1, self.n_rows)

    def constants(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every fp16 constant in the weight file, in the order in which they lie there."""
        for chunk in range(self.n_chunks):
            yield f"bias_{chunk}", (self.chunk_tokens,)
        for head in range(self.n_head_kv):
            for chunk in range(self.n_chunks):
                yield f"k_{head}_{chunk}", (self.chunk_tokens, self.head_dim_k + 1, 1, 1)
                yield f"v_{head}_{chunk}", (self.head_dim_v, self.chunk_tokens, 1, 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of K, V and bias (the file has 64 to 128 more per constant)."""
        per_key = self.n_head_kv * (self.head_dim_k + 1 + self.head_dim_v) + 1
        return 2 * self.page_tokens * per_key

    @property
    def name(self) -> str:
        """Every number that shapes the program, as `parse` reads it; also the file name of the template."""
        return (
            f"page-h{self.n_head_kv}-k{self.head_dim_k}-v{self.head_dim_v}-r{self.n_rows}"
            f"-t{self.page_tokens}-c{self.chunk_tokens}"
        )

    @classmethod
    def parse(cls, name: str) -> PageGeometry:
        """The geometry that calls itself `name`."""
        match = NAME.fullmatch(name)
        if match is None:
            raise SettingError(f"{name!r} is no page geometry; expected a form like {NAME_EXAMPLE}")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return (
            f"{self.page_tokens} keys x {self.n_head_kv} heads x {self.head_dim_k}/{self.head_dim_v}, "
            f"{self.n_rows} rows, chunks of {self.chunk_tokens}"
        )
