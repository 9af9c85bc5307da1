"""Natural text for measurements: Python's own language reference, which every installation carries.

Random token ids would be a bad prompt: attention and sampling behave unlike anything a user sends.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

from common.errors import ModelError
from common.ggml.vocabulary import Vocabulary


@lru_cache(maxsize=4)
def _all_tokens(model: Path) -> NDArray[np.int32]:
    vocabulary = Vocabulary.load(model)
    try:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        return np.array(vocabulary.tokenize(text, add_special=False, parse_special=False), np.int32)
    finally:
        vocabulary.close()


def natural_tokens(model: Path, n: int, *, skip: int = 0) -> NDArray[np.int32]:
    """Token ids i32 [n] of natural text in the model's vocabulary, from its token `skip` on. Raises ModelError."""
    tokens = _all_tokens(model)
    if skip + n > len(tokens):
        raise ModelError(f"asked for {n} tokens of text from token {skip}; there are {len(tokens)}")
    return tokens[skip : skip + n].copy()
