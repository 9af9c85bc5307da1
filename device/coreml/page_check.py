"""Checks one page package on its own: files, constants, and what its program answers, against float64.

The oracle is computed from the page's constants as they lie in the weight file, not through the program, so a program
that reads the wrong constant, or constants in the wrong order, is caught; with the stored rows at hand the constants
themselves are compared too. Called by `pages verify`, `device-check` and the builder's tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import PackageError
from device.coreml import blob
from device.coreml.accuracy import ARITHMETICS, BOUNDS, Inputs, ask, attend_float64, row_errors
from device.coreml.geometry import MASKED, PageGeometry
from device.coreml.page_rows import V_MAX, PageConstants
from device.coreml.reference import Arithmetic, Program
from device.coreml.template import Template, open_template

USUAL = tuple(a for a in ARITHMETICS if a.accumulator != "in-order")
"""What hardware is expected to do. In order is the worst case, and takes the interpreter a minute a product page."""
SCORE_SPREADS = (1.0, 3.0)
"""Standard deviation of the scores asked for: as realistic texts have them, and peaky."""


@dataclass(frozen=True)
class Finding:
    """Errors of one page under one arithmetic, worst over the queries asked."""

    arithmetic: Arithmetic
    o_error: float
    lse_error: float

    @property
    def within_bounds(self) -> bool:
        o_bound, lse_bound = BOUNDS[self.arithmetic.accumulator]
        return self.o_error <= o_bound and self.lse_error <= lse_bound


@dataclass(frozen=True)
class PageCheck:
    """What was found in one page."""

    geometry: PageGeometry
    n_keys: int
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(finding.within_bounds for finding in self.findings)


def check_page(path: Path, arithmetics: Sequence[Arithmetic] = USUAL, seed: int = 0) -> PageCheck:
    """Check files and constants, then ask the program under each arithmetic.

    Raises PackageError or BlobError where files or constants are not those of a page.
    """
    template = open_template(path)
    blob.verify(path / template.weight_file)
    constants = read_constants(template)
    n_keys = _check_constants(constants, path)
    program, geometry = Program.load(path), template.geometry
    questions = [_inputs(constants, n_keys, spread, seed) for spread in SCORE_SPREADS]
    oracles = [attend_float64(question) for question in questions]
    findings = []
    for arithmetic in arithmetics:
        program.arithmetic = arithmetic
        errors = [
            row_errors(ask(program, geometry, question.queries, centre), oracle)
            for question, oracle in zip(questions, oracles, strict=True)
            for centre in (None, oracle[1].astype(np.float32))
        ]
        o_errors, lse_errors = zip(*errors, strict=True)
        findings.append(Finding(arithmetic, max(o_errors), max(lse_errors)))
    return PageCheck(geometry, n_keys, tuple(findings))


def read_constants(template: Template) -> PageConstants:
    """The constants of a page (opened as a template), copied out of its weight file."""
    constants = PageConstants.allocate(template.geometry)
    with blob.WeightFile(template.path / template.weight_file) as weights:
        for view, offset in zip(constants.by_name().values(), template.offsets, strict=True):
            view[...] = weights.array(offset, view.shape)
    return constants


def _check_constants(constants: PageConstants, path: Path) -> int:
    """The number of keys, after checking everything the program takes for granted."""
    g = constants.geometry
    if not constants.k.any():
        raise PackageError(f"{path}: a template without keys, not a page")
    bias = constants.bias.reshape(-1)
    n_keys = int(np.count_nonzero(bias == 0))
    if (bias[:n_keys] != 0).any() or (bias[n_keys:] != np.float16(MASKED)).any():
        raise PackageError(f"{path}: the bias is not 0 for the first keys and {MASKED:.0f} for the others")
    if (constants.k[..., -1] != 1).any():
        raise PackageError(f"{path}: the last column of K is not 1: these are not the keys of a page")
    rest = constants.k.reshape(g.n_head_kv, g.page_tokens, -1)[:, n_keys:, :-1]
    v = constants.v.transpose(0, 1, 3, 2).reshape(g.n_head_kv, g.page_tokens, -1)
    if rest.any() or v[:, n_keys:].any():
        raise PackageError(f"{path}: masked keys are not zero from key {n_keys} on")
    if not np.isfinite(constants.k).all() or not np.abs(v).max() <= V_MAX:
        raise PackageError(f"{path}: K is not finite, or |V| is above {V_MAX:.0f}")
    return n_keys


def _inputs(constants: PageConstants, n_keys: int, spread: float, seed: int) -> Inputs:
    """Random queries, scaled so that their scores over the page's keys have the given standard deviation."""
    g = constants.geometry
    k = constants.k.reshape(g.n_head_kv, g.page_tokens, -1)[:, :n_keys, :-1]
    v = constants.v.transpose(0, 1, 3, 2).reshape(g.n_head_kv, g.page_tokens, -1)[:, :n_keys]
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((g.n_head_kv, g.n_rows, g.head_dim_k), dtype=np.float32)
    some = k[:, :: max(n_keys // 256, 1)].astype(np.float32)
    found = float((queries @ some.swapaxes(1, 2)).std())
    return Inputs(queries * (spread / found if found > 0 else 1.0), k, v)
