"""Where a model is cut in two, and the file that holds its tail.

`plan_split` decides and touches nothing; `write_tail` cuts and decides nothing. A tail file is an ordinary GGUF of the
layers [layer, n): its blocks are numbered from 0, and these keys say where they belong:

    split.layer_start    u32  the model's number of block 0
    split.n_layer_full   u32  layers of the whole model
    split.no_head        u32  1 when the output head was left out
    split.cycle          u32  layers after which the model's kinds repeat; only gemma3, whose own key for it gives way

With its head, a tail also loads in stock llama.cpp, which asks for a token_embd.weight and computes logits with it when
there is no output.weight. So the one matrix a tail's head needs, the output's, is stored under that name and no second
one is carried along. The tokenizer stays behind: a tail never sees text. One tail stock runs wrongly: that of a gemma3
of 62 layers, whose odd attention scale stock recognises by the number of blocks. Called by the worker's side,
`outrigger split` and tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import ModelError, SettingError
from common.ggml.header import StringArray, TensorInfo, read_header
from common.limits import MIB
from common.model.gguf_stream import GgufStream, Progress
from common.model.spec import ModelSpec

SHARE_ON_HOST = 5 / 8
"""The default split: 40 of 64 layers stay on the host, as in the published measurements."""
COPY_BYTES = 8 * MIB
PER_LAYER_KEYS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.recurrent_layers",
    "attention.sliding_window_pattern",
    "feed_forward_length",
)
"""Keys under the architecture's name that may hold one value a layer."""


@dataclass(frozen=True)
class SplitPlan:
    """Layers [0, layer) run on the host, [layer, n_layer_full) on the worker."""

    layer: int
    n_layer_full: int
    cycle: int

    @property
    def on_boundary(self) -> bool:
        """Whether both parts hold whole layer cycles, as peers of the base protocol require."""
        return self.layer % self.cycle == 0

    @property
    def head(self) -> range:
        return range(self.layer)

    @property
    def tail(self) -> range:
        return range(self.layer, self.n_layer_full)


def plan_split(spec: ModelSpec, layer: int | None = None, any_layer: bool = False) -> SplitPlan:
    """Checks a wished split point, or chooses one: the boundary of the layer cycle nearest to 5/8 of the layers.

    any_layer: allow points inside a cycle (our own worker runs them). The default point lies on a boundary whenever
    the model has one. Raises SettingError naming the allowed values.
    """
    inside = range(spec.layer_start + 1, spec.n_layer_full)
    boundaries = [candidate for candidate in inside if candidate % spec.cycle == 0]
    allowed = inside if any_layer else boundaries
    if not allowed:
        hint = f"; inside a cycle it can be cut at {_spoken(inside)}" if inside and not any_layer else ""
        raise SettingError(
            f"{spec.path} cannot be split: it has {len(spec.layers)} layers in cycles of {spec.cycle}{hint}"
        )
    if layer is None:
        wished = spec.n_layer_full * SHARE_ON_HOST
        layer = min(boundaries or inside, key=lambda candidate: abs(candidate - wished))
    elif layer not in allowed:
        raise SettingError(
            f"cannot split {spec.path} at layer {layer}: allowed are {_spoken(allowed)}"
            + (f" (boundaries of its cycle of {spec.cycle} layers)" if allowed is boundaries else "")
        )
    return SplitPlan(layer, spec.n_layer_full, spec.cycle)


def write_tail(
    path: Path,
    layer: int,
    out: Path,
    head: bool = True,
    progress: Progress | None = None,
    sink: BinaryIO | None = None,
) -> None:
    """Writes layers [layer, n) of the model `path`, and its output head unless head is False, to the file `out`.

    sink: a pipe or the like to write to instead; `out` then only names it and a folder for some kilobytes.

    Layers are numbered as in the whole model, also when `path` is itself a tail. Nothing appears at `out` before it
    is complete; tensor data is copied in blocks. Raises SettingError (layer), ModelError (files, disk).
    """
    spec = ModelSpec.read(path)
    plan = plan_split(spec, layer, any_layer=True)
    if out.exists() and out.samefile(path):
        raise ModelError(f"the tail cannot replace the model it is cut from ({path}); name another file")
    if head and not spec.has_output:
        raise ModelError(f"{path} has no output head to copy; write its tail without one (--no-head)")
    tensors = dict(_renamed(spec, plan, head))
    metadata = _metadata(spec, read_header(path).metadata, plan, head)
    with path.open("rb", buffering=0) as source, GgufStream(out, spec.arch, progress, sink) as file:
        for key, value in metadata.items():
            file.add_key(key, value)
        for name, info in tensors.items():
            file.declare(name, info.shape[::-1], info.type, info.n_bytes)
        file.begin()
        for info in tensors.values():
            file.write(_blocks(source, info))


def _spoken(layers: range | list[int]) -> str:
    if isinstance(layers, range) and len(layers) > 1:
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


def _renamed(spec: ModelSpec, plan: SplitPlan, head: bool) -> Iterator[tuple[str, TensorInfo]]:
    """(name in the tail, tensor of the source), in the source's order."""
    output = "output.weight" if "output.weight" in spec.tensors else "token_embd.weight"
    for name, info in spec.tensors.items():
        if name.startswith("blk."):
            _, block, part = name.split(".", 2)
            there = int(block) + spec.layer_start - plan.layer
            if there >= 0:
                yield f"blk.{there}.{part}", info
        elif name == output:
            if head:
                yield "token_embd.weight", info
        elif name == "output_norm.weight":
            if head:
                yield name, info
        elif name != "token_embd.weight":
            yield name, info  # what all layers share, such as rope_freqs.weight


def _metadata(spec: ModelSpec, source: dict[str, Any], plan: SplitPlan, head: bool) -> dict[str, Any]:
    """The tail's metadata: the source's, without its tokenizer, for fewer layers."""
    skipped = ("tokenizer.", "split.")
    kept = {
        key: value
        for key, value in source.items()
        if not key.startswith(skipped) and not isinstance(value, StringArray)
    }
    del kept["general.architecture"]  # the stream writes it first
    for key in PER_LAYER_KEYS:
        values = kept.get(f"{spec.arch}.{key}")
        if isinstance(values, list):
            kept[f"{spec.arch}.{key}"] = values[plan.layer - spec.layer_start :]
    name = spec.name.partition(", layers ")[0]  # of the whole model, when this is a tail of a tail
    kept |= {
        "general.name": f"{name}, layers {plan.layer} to {plan.n_layer_full - 1}",
        f"{spec.arch}.block_count": len(plan.tail),
        f"{spec.arch}.vocab_size": spec.n_vocab,
        "tokenizer.ggml.model": "none",
        "split.layer_start": plan.layer,
        "split.n_layer_full": plan.n_layer_full,
        "split.no_head": int(not head),
    }
    if spec.recurrent is not None:
        # without it the pattern of layer kinds would be counted from block 0
        kept[f"{spec.arch}.attention.recurrent_layers"] = [
            spec.kind(layer) == "recurrent" for layer in plan.tail
        ]
    if spec.arch == "gemma3":
        _keep_sliding(kept, [spec.kind(layer) == "sliding" for layer in plan.tail])
        kept["split.cycle"] = spec.cycle
    return dict(
        sorted(kept.items())
    )  # a tail of a tail has the same bytes as one cut straight from the model


def _keep_sliding(kept: dict[str, Any], flags: list[bool]) -> None:
    """Lets the tail say which of its layers slide: the pattern would be counted from block 0. Where none does, it says
    nothing of windows, because stock aborts on a window without a sliding layer."""
    if any(flags):
        kept["gemma3.attention.sliding_window_pattern"] = flags
    else:
        for key in ("attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"):
            kept.pop(f"gemma3.{key}", None)


def _blocks(source: FileIO, info: TensorInfo) -> Iterator[memoryview]:
    """A tensor's bytes through one buffer. Read and not mapped: a map would show up as memory used, tail after tail."""
    buffer = memoryview(bytearray(min(COPY_BYTES, info.n_bytes)))
    source.seek(info.offset)
    left = info.n_bytes
    while left:
        n_read = source.readinto(buffer[: min(left, len(buffer))])
        if not n_read:
            raise ModelError(f"{source.name} became shorter while it was copied")
        yield buffer[:n_read]
        left -= n_read
