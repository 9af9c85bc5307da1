"""What would go wrong with a bundle on a device, read off its packages: each finding with its remedy.

Works on any folder of .mlpackage, not only on our bundles (with a manifest, its files are checked, too). An `error` is
known to fail or to answer nonsense; a `warning` is known to cost speed or to need something of the app; a `note` is
expected here. Reads programs and sizes, runs nothing. Called by services.cli.bundle and convert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import PackageError
from device.coreml.convert.caches import STATE_MULTIPLE
from device.coreml.convert.manifest import FILE_NAME, Manifest, wrong_files
from device.coreml.convert.options import LAYERS_A_PROGRAM_MAX, PART_BYTES_MAX
from device.coreml.reference.package import ANY, Function, Package, TensorType

Level = Literal["error", "warning", "note"]
WIDTH_MAX, CHANNELS_MAX = 16_384, 65_536
STATE_WRITE_TOKENS_MAX = 64
LAST_AXIS_BYTES = 64
OFF_ENGINE = {
    "gather": "look-ups run on the CPU", "gather_nd": "look-ups run on the CPU",
    "gather_along_axis": "look-ups run on the CPU", "scatter": "scatters run on the CPU",
    "scatter_nd": "scatters run on the CPU", "while_loop": "loops run on the CPU", "cond": "branches run on the CPU",
    "cumsum": "running sums run on the CPU", "topk": "sorting runs on the CPU",
    "einsum": "einsum is often left to the GPU",
    "non_zero": "its size depends on data", "random_normal": "random numbers run on the CPU",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """`where` is a package (and function), `what` names the value found, `remedy` what to do."""

    level: Level
    rule: str
    where: str
    what: str
    remedy: str


def lint(folder: Path) -> list[Finding]:
    """Findings of every package below `folder` (or of one package). Raises PackageError where there is none."""
    packages = [folder] if folder.suffix == ".mlpackage" else sorted(folder.glob("*.mlpackage"))
    if not packages:
        raise PackageError(f"{folder}: no .mlpackage in it")
    findings = list(_manifest(folder)) if (folder / FILE_NAME).is_file() else []
    for path in packages:
        try:
            package = Package(path)
        except PackageError as error:
            findings.append(Finding("error", "unreadable", path.name, str(error), "make this part again"))
            continue
        findings += _sizes(package)
        found: list[Finding] = []
        for function in package.functions.values():
            where = f"{path.name} {function.name}"
            found += [
                *_dimensions(function, where), *_states(function, where), *_operations(function, where),
                *_precision(function, where), *_masks(function, where, package),
            ]  # fmt: skip
        findings += _merged(found)
    return findings


def _merged(findings: list[Finding]) -> list[Finding]:
    """What several functions of a package have in common is told once, with their names."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for each in findings:
        package, _, function = each.where.partition(" ")
        alike.setdefault((each.level, each.rule, package, each.what, each.remedy), []).append(function)
    return [
        Finding(level, rule, f"{package} {', '.join(dict.fromkeys(functions))}", what, remedy)
        for (level, rule, package, what, remedy), functions in alike.items()
    ]


def _manifest(folder: Path) -> Iterator[Finding]:
    try:
        manifest = Manifest.read(folder)
    except PackageError as error:
        yield Finding("error", "manifest", FILE_NAME, str(error), "convert again")
        return
    for part in manifest.parts:
        for wrong in wrong_files(part.files, folder):
            yield Finding("error", "files", part.package, wrong, "copy or convert this part again")
    for wrong in wrong_files(manifest.others, folder):
        yield Finding("error", "files", folder.name, wrong, "copy it again")


def _sizes(package: Package) -> Iterator[Finding]:
    n_bytes = package.weight_path.stat().st_size if package.weight_path.exists() else 0
    if n_bytes > PART_BYTES_MAX:
        yield Finding(
            "error", "file-size", package.path.name, f"weight file of {n_bytes / 1e9:.2f} GB; iOS reads up to 1 GB",
            "more --chunks, or fewer bits (--lut-embeddings, --lut-layers, --lut-head)",
        )  # fmt: skip
    for function in package.functions.values():
        n_layers = Counter(op.type for op in function.operations)["softmax"]
        if n_layers > LAYERS_A_PROGRAM_MAX:
            yield Finding(
                "warning", "layers", f"{package.path.name} {function.name}", f"{n_layers} attention layers",
                f"more --chunks: programs beyond about {LAYERS_A_PROGRAM_MAX} layers fail to compile",
            )  # fmt: skip


def _tensors(function: Function) -> Iterator[tuple[str, str, TensorType]]:
    """(operation, name, type) of every tensor an operation makes."""
    for op in function.operations:
        for output in op.outputs:
            if output.type.WhichOneof("type") == "tensorType":
                yield op.type, output.name, TensorType.of(output.type.tensorType, output.name)


def _dimensions(function: Function, where: str) -> Iterator[Finding]:
    for operation, name, kind in _tensors(function):
        shape = kind.shape
        if operation == "const" or operation.startswith("constexpr") or kind.kind == "STRING":
            continue
        if ANY in shape:
            if operation not in ("gather", "mul", "cast"):
                yield Finding(
                    "warning", "shape", where, f"{name} has an open dimension", "fix the input's shapes"
                )
            continue
        limits = [CHANNELS_MAX] * max(len(shape) - 2, 0) + [WIDTH_MAX] * 2
        for n, limit in zip(shape, limits[-len(shape) :] if shape else [], strict=False):
            if n > limit:
                yield Finding(
                    "error", "dimension", where, f"{operation} {name} is {kind}: {n} passes {limit}",
                    "split it: the engine's tensors are at most 16,384 high and wide and have 65,536 channels",
                )  # fmt: skip
    for op in function.operations:
        if op.type == "conv":
            kind = TensorType.of(op.outputs[0].type.tensorType, op.outputs[0].name)
            if len(kind.shape) == 4 and kind.shape[1] > WIDTH_MAX:
                yield Finding(
                    "error", "channels", where, f"conv {op.outputs[0].name} has {kind.shape[1]} output channels",
                    f"split it into convolutions of at most {WIDTH_MAX}",
                )  # fmt: skip


def _states(function: Function, where: str) -> Iterator[Finding]:
    for name, kind in function.states.items():
        wrong = [n for n in kind.shape[2:] if n % STATE_MULTIPLE]
        if wrong:
            yield Finding(
                "error", "state-multiple", where, f"state {name} is {kind}: {wrong[0]} is no multiple of 32",
                "pad the context or the head: such states load on the CPU and fail on the Neural Engine",
            )  # fmt: skip
    if len({kind.shape for kind in function.states.values()}) > 1:
        yield Finding(
            "note", "state-shapes", where, f"{len(function.states)} states of different shapes",
            "M1 and A14 fail with this: convert with --context up to the window for them",
        )  # fmt: skip


def _operations(function: Function, where: str) -> Iterator[Finding]:
    counts = Counter(op.type for op in function.operations)
    for operation, why in OFF_ENGINE.items():
        if counts[operation]:
            small = operation == "gather" and (counts[operation] <= 4)
            yield Finding(
                "note" if small else "warning", "off-engine", where, f"{counts[operation]} x {operation}: {why}",
                "expected: token and position look-ups" if small else "compute it without, or outside the program",
            )  # fmt: skip
    if counts["linear"]:
        yield Finding(
            "warning", "linear", where, f"{counts['linear']} linear operations",
            "1x1 convolutions: stateful programs with linear layers were seen to leave the Neural Engine",
        )  # fmt: skip
    for op in function.operations:
        if op.type == "conv" and _dilated(op):
            yield Finding(
                "warning",
                "dilated",
                where,
                f"{op.outputs[0].name} is a dilated convolution",
                "they run on the CPU",
            )


def _dilated(op: object) -> bool:
    bindings = op.inputs["dilations"].arguments if "dilations" in op.inputs else []  # type: ignore[attr-defined]
    return any(
        n != 1
        for each in bindings
        if each.WhichOneof("binding") == "value"
        for n in each.value.immediateValue.tensor.ints.values
    )


def _precision(function: Function, where: str) -> Iterator[Finding]:
    kinds = Counter(
        kind.kind
        for operation, _, kind in _tensors(function)
        if kind.kind in ("FLOAT16", "FLOAT32") and operation != "const"
    )
    if kinds["FLOAT32"]:
        yield Finding(
            "error" if kinds["FLOAT16"] else "warning", "precision", where,
            f"{kinds['FLOAT32']} values in fp32 beside {kinds['FLOAT16']} in fp16",
            "compute in fp16 throughout: the engine has no fp32, and a mixed program is cut into pieces",
        )  # fmt: skip


def _masks(function: Function, where: str, package: Package) -> Iterator[Finding]:
    if not function.states:
        return
    n_tokens = next((kind.shape[1] for name, kind in function.inputs.items() if name == "hidden_states"), 1)
    if n_tokens > 1 and "update_mask" not in function.inputs:
        yield Finding(
            "error", "update-mask", where, f"{n_tokens} tokens are written to a state at once without an update_mask",
            "static prefill with update_mask: writes at a run-time position fail on phones, and a last batch that "
            "is not full must be read token by token",
        )  # fmt: skip
    if n_tokens > STATE_WRITE_TOKENS_MAX:
        yield Finding(
            "warning", "batch", where, f"a batch of {n_tokens} tokens",
            "--batch 64 or less: large batches with states were seen on CPU and GPU instead",
        )  # fmt: skip
    functions = package.functions
    if "infer" in functions and "prefill" not in functions:
        yield Finding(
            "warning", "functions", where, "no prefill function", "prompts will be read token by token"
        )
