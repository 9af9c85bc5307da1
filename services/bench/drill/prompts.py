"""Prompts for drills and soaks, each with the right answer: that of a host that never had a worker.

A few prompts in turn suffice: a host holds one conversation, so that one which comes again is read from its beginning.
Used by services.bench.drill.run and services.bench.soak.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.config import Settings
from common.ggml.vocabulary import Vocabulary
from services.bench.drill.trial import Prompt
from services.bench.rig import Rig
from services.bench.texts import natural_tokens

TEXT_STEP = 4567


def prompts(
    model: Path,
    like: Settings,
    lengths: list[tuple[int, int]],
    progress: Callable[[str], None],
    n_first: int = 0,
) -> list[Prompt]:
    """One prompt for each (tokens of the prompt, tokens of the answer), answered by a host alone set up `like` this.

    That host keeps all pages in memory; it is started and ended here. n_first: so many tokens of each are asked by
    themselves before. Raises ServiceError when the host fails.
    """
    host = like.host
    vocabulary = Vocabulary.load(model)
    end_ids = frozenset(vocabulary.end_ids)
    vocabulary.close()
    made = []
    with Rig(
        model,
        n_ctx=host.n_ctx,
        pinned=False,
        threads=host.n_threads,
        weights=host.weights,
        decode=host.decode,
        kv_host_tokens=host.kv_host_tokens,
        kv_host_bytes=host.kv_host_bytes,
        page_tokens=host.page_tokens,
        group_pages=host.group_pages,
        hold="off",
    ) as rig:
        alone = rig.seat_alone()
        rig.wait_ready(alone)
        for number, (n_prompt, n_tokens) in enumerate(lengths):
            progress(f"right answers by a host alone: {number + 1} of {len(lengths)}")
            token_ids = natural_tokens(model, n_prompt, skip=number * TEXT_STEP)
            right = alone.client.generate(token_ids, n_tokens).token_ids
            ends = [index for index, token_id in enumerate(right) if token_id in end_ids]
            made.append(Prompt(token_ids.tolist(), right[: ends[0]] if ends else right, n_first))
    return made
