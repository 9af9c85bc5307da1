"""`outrigger bench convert`: what converting a 4B Gemma 3 takes here: time, memory, sizes.

A synthetic checkpoint in Hugging Face layout has the published 4B model's dimensions (34 layers, width 2,560, 8 heads,
4 KV heads, window 1,024, linear factor 8; random bf16 weights), but two layers and a sixteenth of the vocabulary. It is
converted for real, in a process of its own, and the parts are executed by the interpreter against float64. Figures
called `4b.` are extrapolated from these: 34 times the layer, 16 times the head and the embeddings.

    layer_s, layer_megabytes      one layer as a chunk of its own (infer and prefill), at --lut-layers
    head_sixteenth_s, ..._mb      16,384 tokens of the head; embeddings_sixteenth likewise
    peak_gb.one, peak_gb.two      memory of the whole process with one layer a chunk, and with two
    peak_gb.embeddings            with the embeddings of the whole vocabulary, for real (not with --quick)
    4b.hours, 4b.gigabytes        extrapolated to the whole model; published: 3.3 GB
    4b.peak_gb                    extrapolated to the largest chunk, the layers' constants being what grows
    residual_error, top1          of the two layers and the head, against float64
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np

from device.coreml.convert.manifest import Manifest
from device.coreml.convert.options import ConvertOptions, plan_parts
from device.coreml.convert.proof import prove
from device.coreml.convert.source import open_model
from services.bench.report import Report, report_options

N_LAYER, N_VOCAB, SHARE = 34, 262_144, 16
ROWS_WRITTEN = 8192
CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131_072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2,
}  # fmt: skip
NORMS = {
    "input_layernorm": 2560, "post_attention_layernorm": 2560, "pre_feedforward_layernorm": 2560,
    "post_feedforward_layernorm": 2560, "self_attn.q_norm": 256, "self_attn.k_norm": 256,
}  # fmt: skip
LINEAR = {
    "self_attn.q_proj": (2048, 2560), "self_attn.k_proj": (1024, 2560), "self_attn.v_proj": (1024, 2560),
    "self_attn.o_proj": (2560, 2048), "mlp.gate_proj": (10_240, 2560), "mlp.up_proj": (10_240, 2560),
    "mlp.down_proj": (2560, 10_240),
}  # fmt: skip
CHILD = """
import json, resource, sys, time
from pathlib import Path
from device.coreml.convert.convert import convert
from device.coreml.convert.options import ConvertOptions
from device.coreml.convert.source import open_model
began = time.process_time()
options, only = ConvertOptions(chunks=int(sys.argv[3])), int(sys.argv[4]) or None
convert(open_model(sys.argv[1]), Path(sys.argv[2]), options, only=only)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"peak_bytes": peak, "cpu_s": time.process_time() - began}))
"""


@click.command("convert")
@click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path), help="Where to work.  [temporary; 3 GB]"
)
@report_options
def command(as_json: bool, quick: bool, results_folder: Path | None, folder: Path | None) -> None:
    """Measure a conversion with a 4B model's dimensions, and extrapolate to the whole."""
    report = Report("convert", "synthetic-4b", as_json=as_json, quick=quick, results_folder=results_folder)
    report.ran("host", "NumPy and coremltools in a process of its own; interpreter for the proof")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = Path(scratch) / "checkpoint"
        report.progress("writing two random layers and a sixteenth of the vocabulary")
        write_checkpoint(source)
        measured = {}
        for n_chunks in (2, 1):
            report.progress(f"converting, {3 - n_chunks} layers a chunk")
            measured[n_chunks] = _converted(source, Path(scratch) / f"bundle{n_chunks}", n_chunks)
        _figures(report, Path(scratch) / "bundle2", measured)
        if not quick:
            report.progress("converting the embeddings of the whole vocabulary")
            write_checkpoint(Path(scratch) / "large", N_VOCAB, 1)
            whole = _converted(Path(scratch) / "large", Path(scratch) / "embeddings", 1, only=1)
            report.figure("peak_gb.embeddings", whole["peak_bytes"] / 1e9, tokens=N_VOCAB)
            report.progress("executing every part")
            tokens = np.random.default_rng(0).integers(0, N_VOCAB // SHARE, 72).astype(np.int32)
            proof = prove(open_model(source), Path(scratch) / "bundle2", tokens, 4, 8)
            report.figure("residual_error", max(proof.residual_errors), tokens=len(tokens))
            report.figure("prefill_vs_infer", proof.prefill_vs_infer, tokens=proof.n_infer)
            report.figure("top1", proof.closeness.top1, tokens=8)
    report.finish()


def write_checkpoint(folder: Path, n_vocab: int = N_VOCAB // SHARE, n_layer: int = 2, seed: int = 0) -> None:
    """A random checkpoint of CONFIG, bf16, written tensor by tensor."""
    folder.mkdir(parents=True)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (n_vocab, 2560)}
    for layer in range(n_layer):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in LINEAR.items()}
        shapes |= {f"{prefix}{name}.weight": (n,) for name, n in NORMS.items()}
    shapes["model.norm.weight"] = (2560,)
    table, at = {}, 0
    for name, shape in shapes.items():
        n_bytes = 2 * int(np.prod(shape))
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    header = json.dumps(table).encode()
    rng = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for shape in shapes.values():
            std = 0.1 if len(shape) == 1 else shape[1] ** -0.5
            for first in range(0, shape[0], ROWS_WRITTEN):
                size = (min(ROWS_WRITTEN, shape[0] - first), *shape[1:])
                values = rng.standard_normal(size, dtype=np.float32) * np.float32(std)
                file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    config = CONFIG | {"vocab_size": n_vocab, "num_hidden_layers": n_layer}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _converted(source: Path, folder: Path, n_chunks: int, only: int = 0) -> dict[str, float]:
    command_line = [sys.executable, "-c", CHILD, str(source), str(folder), str(n_chunks), str(only)]
    done = subprocess.run(command_line, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _figures(report: Report, folder: Path, measured: dict[int, dict[str, float]]) -> None:
    embeddings, *chunks, head = Manifest.read(folder).parts
    layer_s = sum(part.seconds for part in chunks) / len(chunks)
    layer_bytes = sum(part.n_bytes for part in chunks) / len(chunks)
    for part in (embeddings, *chunks, head):
        report.row(part=part.package, seconds=part.seconds, bytes=part.n_bytes, error=part.palette_error)
    report.figure("layer_s", layer_s, weights=chunks[0].n_weights)
    report.figure("layer_megabytes", layer_bytes / 1e6, weights=chunks[0].n_weights)
    for name, part in (("head_sixteenth", head), ("embeddings_sixteenth", embeddings)):
        report.figure(f"{name}_s", part.seconds, weights=part.n_weights)
        report.figure(f"{name}_megabytes", part.n_bytes / 1e6, weights=part.n_weights)
    one, two = (measured[n]["peak_bytes"] for n in (2, 1))
    report.figure("peak_gb.one", one / 1e9, layers=1)
    report.figure("peak_gb.two", two / 1e9, layers=2)
    seconds = N_LAYER * layer_s + SHARE * (head.seconds + embeddings.seconds)
    n_bytes = N_LAYER * layer_bytes + SHARE * (head.n_bytes + embeddings.n_bytes)
    report.figure("4b.hours", seconds / 3600, layers=2)
    report.figure("4b.gigabytes", n_bytes / 1e9, layers=2)
    largest = _layers_of_the_largest_chunk()
    report.figure("4b.layers_a_chunk", largest, layers=N_LAYER)
    chunk_peak = one + (largest - 1) * max(two - one, layer_bytes * 2)
    report.figure("4b.peak_gb", chunk_peak / 1e9, layers=2)


def _layers_of_the_largest_chunk() -> int:
    """Of the whole model, as the converter would cut it."""
    from dataclasses import replace

    from device.coreml.convert.description import GemmaModel
    from device.coreml.convert.rope import Rope

    whole = GemmaModel(
        "4b", None, ("sliding",) * N_LAYER, 2560, 10_240, 8, 4, 256, N_VOCAB, 131_072, 1024, 1e-6, 1 / 16,  # type: ignore[arg-type]
        {"sliding": Rope(1e4), "global": Rope(1e6, 8.0)},
    )  # fmt: skip
    chunks = [part.chunk for part in plan_parts(replace(whole), ConvertOptions()) if part.chunk]
    return max(chunk.last - chunk.first for chunk in chunks)
