"""How many groups the host should let go. A pure function of numbers."""

from __future__ import annotations


def release_end(
    *, n_tokens: int, group_first: int, groups_kept: int, group_tokens: int, host_tokens: int
) -> int:
    """The group up to which the host should free its memory; group_first when nothing is to go.

    n_tokens: of the sequence. group_first: the host holds the groups from here on. groups_kept: the journal has all
    pages of the groups [0, groups_kept). host_tokens: the limit. Ahead of need: from the limit on there is always room
    for one group more, so that no step waits for a release. The group of the newest token stays.
    """
    if n_tokens < host_tokens or n_tokens == 0:
        return group_first
    in_memory = n_tokens - group_first * group_tokens
    too_many = max(0, in_memory + group_tokens - host_tokens)
    wanted = group_first - (-too_many // group_tokens)
    return max(group_first, min(wanted, groups_kept, (n_tokens - 1) // group_tokens))
