"""What `outrigger verify --frozen` compares: ways of attending old groups, and how far each is from the paged path.

`Way` counts one of them. `Probe` stands in front of the sequence that decodes by pages alone: it lets it do so, and
asks every way the same real queries, whose answers over the frozen groups it compares with float64. Pages of int8 keys
and values are a way here only, to show why the product has none. Called by verify_frozen.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from common.attention.partial import PartialAttention, fold_all
from common.engine.kv_source import KvSource, PageQuery
from common.engine.local_pages import LocalPages
from device.coreml.accuracy import Inputs, attend_float64, row_errors
from device.coreml.frozen.runtime import KernelRuntime
from device.coreml.page_program import PagePartial
from device.coreml.page_rows import PageConstants
from device.coreml.template import Template
from device.frozen_source import FrozenSource

INT8_STEPS = 127


@dataclass
class Way:
    """One way of attending old groups against the paged path alone. `name` is its suffix in figures."""

    name: str
    title: str
    kl: list[float] = field(default_factory=list)
    """Nats a token, each way going on from its own rows."""
    top1: int = 0
    """Tokens whose greedy choice is that of the paged path."""
    attention: dict[int, float] = field(default_factory=dict)
    """Layer -> the worst row's error against float64 over the frozen keys: output relative, log-sum-exp absolute."""
    layers: dict[int, float] = field(default_factory=dict)
    """Layer -> largest relative error of the residual behind it, from the same residual before it."""
    keys: int = 0
    """Keys that pages answered for, over layers and tokens."""

    @property
    def attention_max(self) -> float:
        return _worst(self.attention.values())

    @property
    def layer_max(self) -> float:
        return _worst(self.layers.values())

    @property
    def kl_mean(self) -> float:
        return sum(self.kl) / len(self.kl)

    def add_layer(self, layer: int, found: np.ndarray, right: np.ndarray) -> None:
        """One token's residuals f32 [n_embd] behind a layer."""
        error = float(np.linalg.norm(found - right) / np.linalg.norm(right))
        self.layers[layer] = _worst((self.layers.get(layer, 0.0), error))

    def add_logits(self, found: np.ndarray, right: np.ndarray) -> bool:
        """One token's logits f32 [n_vocab]. Returns whether the greedy choice is the same."""
        self.kl.append(divergence(right, found))
        same = int(found.argmax()) == int(right.argmax())
        self.top1 += same
        return same

    def join(self, other: Way) -> None:
        """Adds another model's counts; layers keep the worse."""
        self.kl += other.kl
        self.top1 += other.top1
        self.keys += other.keys
        for mine, theirs in ((self.attention, other.attention), (self.layers, other.layers)):
            for layer, error in theirs.items():
                mine[layer] = _worst((mine.get(layer, 0.0), error))


class Probe:
    """A KvSource that attends by ordinary kernels and asks `sources` the same, for `ways` in the same order.

    The first way is ordinary kernels themselves; the sources are of sequences whose rows are equal to this one's.
    """

    def __init__(self, sources: Sequence[FrozenSource], ways: Sequence[Way]) -> None:
        self._sources, self._ways = sources, ways

    def choose(self, local: LocalPages) -> list[KvSource]:
        """Given to set_sources."""
        self._local = local
        return [self]

    def start_attend(self, query: PageQuery) -> None:
        self._query = query

    def wait_attend(self) -> list[PartialAttention]:
        query, first = self._query, self._sources[0].groups
        groups = range(query.rows.position // first.shape.group_tokens)
        ordinary = self._local.attend_pages(query, 0)
        asked = [
            source.groups.ask(query.layer, query.q, query.scale, query.rows.n_tokens, groups).wait()
            for source in self._sources
        ]
        if groups:
            oracle = self._oracle(query, len(groups) * first.shape.group_tokens)
            for way, parts in zip(self._ways, (dict(enumerate(ordinary)), *asked), strict=True):
                if set(parts) >= set(groups):
                    _add_attention(way, query.layer, [parts[group] for group in groups], oracle)
        return ordinary

    def _oracle(self, query: PageQuery, n_keys: int) -> tuple[np.ndarray, np.ndarray]:
        shape = self._sources[0].groups.shape
        k, v, _ = self._sources[0].rows(query.layer, 0, n_keys)
        k, v = (
            rows.view(np.float16).reshape(n_keys, shape.n_head_kv, shape.head_dim).transpose(1, 0, 2)
            for rows in (k, v)
        )
        return attend_float64(Inputs(query.q * np.float32(query.scale), k, v))


def _add_attention(
    way: Way, layer: int, parts: Sequence[PartialAttention], oracle: tuple[np.ndarray, np.ndarray]
) -> None:
    whole = fold_all(parts)
    errors = row_errors(PagePartial(whole.m, whole.l, whole.o), oracle)
    way.attention[layer] = _worst((way.attention.get(layer, 0.0), *errors))


class Int8Runtime(KernelRuntime):
    """Ordinary kernels in fp32 over constants that went through int8, so that nothing but the rounding is seen.

    K has a scale for each key and V one for each channel of a chunk: the best of three scalings.
    """

    engine = "int8"

    def write(self, template: Template, constants: PageConstants, path: Path, slot: Path | None) -> None:
        k = constants.k.copy()
        k[..., :-1] = through_int8(constants.k[..., :-1])
        super().write(template, replace(constants, k=k, v=through_int8(constants.v)), path, slot)


def through_int8(values: np.ndarray) -> np.ndarray:
    """f16 values rounded to 127 steps of the largest magnitude along the last axis."""
    scale = np.abs(values).max(axis=-1, keepdims=True).astype(np.float32) / INT8_STEPS
    steps = np.round(values / np.where(scale > 0, scale, 1))
    return (steps * scale).astype(np.float16)


def _worst(errors: Iterable[float]) -> float:
    """The largest; NaN, which no comparison finds, when one is."""
    return float(np.max([0.0, *errors]))


def divergence(right: np.ndarray, found: np.ndarray) -> float:
    """KL(right || found) in nats of two rows of logits."""
    log_p, log_q = (_log_softmax(logits.astype(np.float64)) for logits in (right, found))
    return float((np.exp(log_p) * (log_p - log_q)).sum())


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    below = logits - logits.max()
    return below - np.log(np.exp(below).sum())
