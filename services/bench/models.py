"""Which models the proofs of `outrigger verify` run on: one of each architecture, real ones where there are some.

Knows names and places only. Called by verify.py and parity.py.
"""

from __future__ import annotations

from pathlib import Path

from common.model.embedded import embedded_model, gemma3_model
from common.model.synthetic import ensure_preset


def models(quick: bool) -> list[tuple[str, Path]]:
    """(label, file). A quick run takes small synthetic models in the place of Gemma 3 and of the larger hybrid.

    Raises ModelError when Gemma 3 is wanted and was never fetched.
    """
    if quick:
        small = [(name, ensure_preset(name)) for name in ("tiny", "tiny-sliding")]
        return [("smollm2", embedded_model()), *small]
    return [
        ("smollm2", embedded_model()),
        ("gemma3-270m", gemma3_model()),
        ("hybrid-60m", ensure_preset("hybrid-60m")),
    ]
