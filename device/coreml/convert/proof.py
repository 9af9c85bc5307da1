"""Proof of a bundle: every part executed by the interpreter over a text, against the float64 forward of the same model.

Compared are residuals at every chunk's end, prefill against single tokens, and whole distributions (KL, and how often
the likeliest token is the same). Argmax alone would not see a stale cache. Called by the command and by tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import SettingError
from device.coreml.convert.conversation import Conversation
from device.coreml.convert.description import GemmaModel
from device.coreml.convert.forward import Forward
from device.coreml.reference import Arithmetic


@dataclass(frozen=True)
class Closeness:
    """Of two series of distributions: KL of ours from the reference in nats, and the share of equal argmax."""

    kl_mean: float
    kl_max: float
    top1: float
    logit_error_max: float


@dataclass(frozen=True)
class Proof:
    """`residual_errors`: of each chunk's end, the worst position's relative L2 distance (the last one is normed)."""

    n_tokens: int
    residual_errors: tuple[float, ...]
    prefill_vs_infer: float
    """Largest relative distance of the last chunk's rows between batches (the last partial) and single tokens."""
    n_infer: int
    closeness: Closeness


def prove(
    model: GemmaModel,
    folder: Path,
    tokens: np.ndarray,
    n_infer: int = 16,
    n_logits: int = 32,
    arithmetic: Arithmetic | None = None,
) -> Proof:
    """Run `tokens` (i32) through the bundle in batches; the last `n_infer` of them again one by one after the rest.

    Logits are compared at the last `n_logits` positions. Raises SettingError where the text does not fit.
    """
    talk = Conversation(folder, arithmetic)
    if not n_infer < len(tokens) <= talk.context:
        raise SettingError(
            f"{len(tokens)} tokens: more than {n_infer} and at most the context of {talk.context}"
        )
    chunks = [part for part in talk.manifest.parts if part.kind == "chunk"]
    forward = Forward(model)
    ends = {part.layers[1] for part in chunks}
    expected = [x for i, x in enumerate(forward.residuals(tokens)) if i in ends]
    last = expected[-1]
    expected[-1] = forward.norm(last, "norm")
    found = talk.read(tokens)
    logits = talk.logits(found[-1][-n_logits:])
    talk.restart()
    talk.read(tokens[:-n_infer])
    single = talk.read(tokens[-n_infer:], one_by_one=True)[-1]
    return Proof(
        len(tokens),
        tuple(distance(ours, theirs) for ours, theirs in zip(found, expected, strict=True)),
        distance(single, found[-1][-n_infer:].astype(np.float64)),
        n_infer,
        closeness(logits, forward.logits(last[-n_logits:])),
    )


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The worst row's L2 distance, relative to that row."""
    difference = np.linalg.norm(found.astype(np.float64) - expected, axis=-1)
    return float((difference / np.linalg.norm(expected.astype(np.float64), axis=-1)).max())


def closeness(ours: np.ndarray, reference: np.ndarray) -> Closeness:
    """Of logits [n, n_vocab], position by position."""
    log_p, log_q = (_log_softmax(logits.astype(np.float64)) for logits in (reference, ours))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    same = ours.argmax(axis=-1) == reference.argmax(axis=-1)
    error = np.abs(ours.astype(np.float64) - reference).max()
    return Closeness(float(kl.mean()), float(kl.max()), float(same.mean()), float(error))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
