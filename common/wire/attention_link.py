"""The link of the attention channel: `Link` with that channel's grammar, and sizes that follow from its CONFIG2.

What a frame may measure is known once pages were configured: until then no piece of a page and no query is let in.
Used by the worker's page session and by the bridge's page pump.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import OutriggerError
from common.limits import N_CTX_MAX, QUERY_TOKENS_MAX
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.attention_grammar import ATTENTION_RULES
from common.wire.base_frames import DTYPE_BYTES
from common.wire.frames import EXT_HDR, Frame
from common.wire.link import Link, Pending

APPEND_ROWS_MAX = 65_536
"""Rows of one base APPEND."""


@dataclass(frozen=True)
class QueryShape:
    """What the last CONFIG or CONFIG2 says of queries. 0 heads: there was none."""

    n_head_kv: int = 0
    n_group: int = 0
    head_dim: int = 0
    row_bytes: int = 0
    """Of a base APPEND."""


class AttentionLink(Link):
    """One connection of the attention channel. `shape` is what the last configuration said, on both ends."""

    rules = ATTENTION_RULES
    noted = frozenset((ext.Hello3, ext.Hello3Ok, ext.Config2, base.Config))

    shape = QueryShape()

    def _bound(self, frame_type: int, bound: int) -> int:
        shape = self.shape
        if frame_type == ext.Attn2.TYPE:
            n_rows = shape.n_group * QUERY_TOKENS_MAX
            fixed = EXT_HDR.size + ext.Attn2.LAYOUT.size
            return min(bound, fixed + base.F32_BYTES * shape.n_head_kv * n_rows * shape.head_dim)
        if frame_type == ext.Append2.TYPE and not shape.n_head_kv:
            return EXT_HDR.size + ext.Append2.LAYOUT.size
        if frame_type == base.Append.TYPE:
            return min(bound, base.Append.LAYOUT.size + 2 * shape.row_bytes * min(APPEND_ROWS_MAX, N_CTX_MAX))
        if frame_type in (base.Attn.TYPE, base.AttnBig.TYPE):
            n_blocks = 1 if frame_type == base.Attn.TYPE else base.BLOCKS_MAX
            return base.Attn.LAYOUT.size + n_blocks * shape.n_head_kv * base.BLOCK_BYTES_Q
        return bound

    def _work(self, frame: Frame) -> int:
        """Tokens times groups: what a query costs grows with both."""
        return frame.n_tok * frame.n_groups if isinstance(frame, ext.Attn2) else 0

    def _learn(self, answer: Frame, answered: Pending) -> None:
        if isinstance(answer, ext.Attn2Ok):
            self.clock.learn(answered.n_tokens, answer.total_ms)

    def _check_shape(self, frame: Frame, error: type[OutriggerError]) -> None:
        shape, expected = self.shape, None
        if isinstance(frame, ext.Attn2):
            n_rows = shape.n_group * frame.n_tok
            expected = DTYPE_BYTES[frame.q_dtype] * shape.n_head_kv * n_rows * shape.head_dim
        elif isinstance(frame, (base.Attn, base.AttnBig)):
            n_blocks = frame.n_blocks if isinstance(frame, base.AttnBig) else 1
            expected = n_blocks * shape.n_head_kv * base.BLOCK_BYTES_Q
        if expected is not None and (frame.q.n_bytes != expected or not expected):  # type: ignore[attr-defined]
            raise error(f"{frame.NAME} has {frame.q.n_bytes} bytes of queries; the pages want {expected}")  # type: ignore[attr-defined]
        if isinstance(frame, base.Append) and frame.rows.n_bytes != 2 * frame.n * shape.row_bytes:
            raise error(f"{frame.NAME} of {frame.n} rows has {frame.rows.n_bytes} bytes")
        if isinstance(frame, ext.Append2) and not shape.n_head_kv:
            raise error(f"{frame.NAME} before CONFIG2")

    def _note(self, frame: Frame) -> None:
        super()._note(frame)
        if isinstance(frame, ext.Config2):
            self.shape = QueryShape(frame.n_head_kv, frame.n_group, frame.head_dim_k)
        elif isinstance(frame, base.Config):
            self.shape = QueryShape(frame.n_head_kv, 0, base.HEAD_DIM, frame.row_bytes)
