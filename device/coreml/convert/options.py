"""What a conversion is asked for, and the parts that follow from it: their names, layers and estimated sizes.

Pure: decides, reads no weights, writes nothing. Names are those that ANEMLL's runtime expects. Called by convert.py and
the command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from common.errors import SettingError
from device.coreml.convert.caches import CacheLayout
from device.coreml.convert.description import MATRICES, GemmaModel
from device.coreml.convert.palette import Lut
from device.coreml.convert.programs import ChunkPlan, head_pieces

PREFIX = "gemma3"
PART_BYTES_MAX = 1_000_000_000
"""iOS reads weight files up to about 1 GB; larger ones load and answer nonsense."""
PART_BYTES_PLANNED = 950_000_000
LAYERS_A_PROGRAM_MAX = 31
BATCH_MAX = 512
LUT_EMBEDDINGS, LUT_LAYERS, LUT_HEAD = Lut(8), Lut(4, 8), Lut(6, 4)
PartKind = Literal["embeddings", "chunk", "head"]


@dataclass(frozen=True)
class ConvertOptions:
    """Sizes in tokens; `chunks` 0 means as few as fit; `scale` is the residual's factor, a power of two."""

    context: int = 1024
    batch: int = 64
    chunks: int = 0
    lut_embeddings: Lut | None = LUT_EMBEDDINGS
    lut_layers: Lut | None = LUT_LAYERS
    lut_head: Lut | None = LUT_HEAD
    scale: float = 1.0

    def lut(self, kind: PartKind) -> Lut | None:
        return {"embeddings": self.lut_embeddings, "chunk": self.lut_layers, "head": self.lut_head}[kind]


@dataclass(frozen=True)
class Part:
    """One package of a bundle. `chunk` says which layers, for a chunk."""

    kind: PartKind
    name: str
    n_weights: int
    estimated_bytes: int
    chunk: ChunkPlan | None = None

    @property
    def package(self) -> str:
        return f"{self.name}.mlpackage"


def plan_parts(model: GemmaModel, options: ConvertOptions) -> tuple[Part, ...]:
    """The parts in the order they run. Raises SettingError: sizes or groups that do not fit the model."""
    CacheLayout(model, options.context)
    most = min(options.context, model.window, BATCH_MAX)
    if not 1 <= options.batch <= most:
        raise SettingError(f"--batch {options.batch}: 1 to {most} (context, window and {BATCH_MAX} bound it)")
    if options.context > model.n_ctx_train:
        raise SettingError(f"--context {options.context}: the model was made for {model.n_ctx_train} tokens")
    _check_groups(model, options)
    n_table = model.n_vocab * model.n_embd
    embeddings, head = (
        Part(kind, _name(name, lut), n_table, _bytes(n_table, lut, model.n_vocab))
        for kind, name, lut in (
            ("embeddings", "embeddings", options.lut_embeddings),
            ("head", "lm_head", options.lut_head),
        )
    )
    return embeddings, *_chunks(model, options), head


def _chunks(model: GemmaModel, options: ConvertOptions) -> list[Part]:
    n_out = sum(model.shape(f"0.{name}")[0] for name in MATRICES)
    layer_bytes = _bytes(model.layer_weights(0), options.lut_layers, n_out)
    most = min(PART_BYTES_PLANNED // layer_bytes, LAYERS_A_PROGRAM_MAX)
    if most < 1:
        raise SettingError(
            f"one layer takes {layer_bytes / 1e6:.0f} MB, beyond a part's limit: use --lut-layers"
        )
    n_chunks = options.chunks or -(-model.n_layer // most)
    if not 1 <= n_chunks <= model.n_layer:
        raise SettingError(f"--chunks {n_chunks}: 1 to {model.n_layer}, the model's layers")
    cuts = [model.n_layer * i // n_chunks for i in range(n_chunks + 1)]
    parts = []
    for i in range(n_chunks):
        plan = ChunkPlan(i, n_chunks, cuts[i], cuts[i + 1])
        n_weights = sum(map(model.layer_weights, range(plan.first, plan.last)))
        name = f"{_name('FFN_PF', options.lut_layers)}_chunk_{i + 1:02d}of{n_chunks:02d}"
        parts.append(Part("chunk", name, n_weights, layer_bytes * (plan.last - plan.first), plan))
    return parts


def _name(part: str, lut: Lut | None) -> str:
    return f"{PREFIX}_{part}" + (f"_lut{lut.bits}" if lut else "")


def _bytes(n_weights: int, lut: Lut | None, n_out: int) -> int:
    """Indices and tables, or fp16."""
    if lut is None:
        return 2 * n_weights
    return n_weights * lut.bits // 8 + (n_out // lut.group if lut.group else 1) * 2 * 2**lut.bits


def _check_groups(model: GemmaModel, options: ConvertOptions) -> None:
    if options.lut_embeddings:
        options.lut_embeddings.check(model.n_vocab, "--lut-embeddings: the embedding")
    if options.lut_layers:
        for name in MATRICES:
            options.lut_layers.check(model.shape(f"0.{name}")[0], f"--lut-layers: {name}")
    if options.lut_head:
        for first, last in head_pieces(model.n_vocab):
            options.lut_head.check(last - first, f"--lut-head: the head's part from token {first}")
