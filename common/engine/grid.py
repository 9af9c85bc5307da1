"""The grid: where a read is cut into ubatches, by absolute positions alone.

Kernels round differently for one row and for many, and for different groups of rows. What a token's rows are must
depend on the token ids alone, so every read is cut at multiples of UBATCH_TOKENS, with a worker and without, and never
ends in a one-row ubatch: the one before gives up a row. Pure; knows no engine. Used by services/mac, parity, benches.
"""

from __future__ import annotations

from itertools import pairwise

from common.limits import UBATCH_TOKENS


def cut(position: int, n_tokens_total: int) -> list[tuple[int, int]]:
    """Cuts the read of positions [position, n_tokens_total) into ubatches (first position, rows).

    `position` is a grid point. Only the read of a single token from a grid point has a one-row ubatch; a caller that
    can start one grid point earlier should (see canonical_end). ValueError otherwise.
    """
    if position < 0 or position % UBATCH_TOKENS or position >= n_tokens_total:
        raise ValueError(
            f"a read starts at a grid point (a multiple of {UBATCH_TOKENS}) before its end, not at {position} of "
            f"{n_tokens_total}"
        )
    edges = [*range(position, n_tokens_total, UBATCH_TOKENS), n_tokens_total]
    if len(edges) > 2 and edges[-1] - edges[-2] == 1:
        edges[-2] -= 1
    return [(a, b - a) for a, b in pairwise(edges)]


def canonical_end(n_tokens_total: int) -> int:
    """The largest grid point such that a read of [0, n_tokens_total) computed all rows before it on full grid ubatches.

    Those rows are the ones a longer prompt with the same beginning would compute, so it may start there. A read that
    would have ended in one row gave up a row of its last full ubatch, which then is not full.
    """
    whole, rest = divmod(n_tokens_total, UBATCH_TOKENS)
    return max(0, whole - (rest == 1)) * UBATCH_TOKENS
