"""Aim: groups of keys given to page programs and groups attended elsewhere are one attention; what is not ready, was
truncated or broke is not claimed. Method: stored rows, pages built in the test's own thread by each runtime, answers
compared with float64; the share by query size, the report and refusals by hand.
"""

import time

import msgspec
import numpy as np
import pytest

from common.attention.partial import PartialAttention, fold_all
from common.config import WorkerSettings
from common.errors import EngineError, PageLoadError, SettingError
from common.wire.frozen import FrozenReport
from device.coreml import toolchain
from device.coreml.accuracy import BOUNDS, Inputs, attend_float64, make_inputs, row_errors
from device.coreml.frozen.runtime import KernelRuntime
from device.coreml.geometry import PageGeometry
from device.coreml.page_program import PagePartial
from device.frozen_groups import FrozenShape, open_by_settings, open_frozen, runs_of

T, N_GROUPS, LAYERS = 256, 6, (3, 7)
SHAPE = FrozenShape(LAYERS, n_head_kv=2, head_dim=32, n_rows=3, group_tokens=T)
SCALE = 32**-0.5
ALL, AMPLE = ((1, 1.0),), 1 << 40


@pytest.fixture(scope="module", autouse=True)
def coremltools():
    pytest.importorskip("coremltools", reason="needs the extra coreml", exc_type=ImportError)


@pytest.fixture(scope="module")
def inputs():
    return make_inputs("smooth", PageGeometry(2, 32, 32, 6, T), n_keys=N_GROUPS * T)


@pytest.fixture
def frozen(inputs, tmp_path):
    opened = []

    def read(layer, first, n):
        return *(
            np.ascontiguousarray(x[:, first : first + n].transpose(1, 0, 2)).reshape(n, -1).view(np.uint8)
            for x in (inputs.k, inputs.v)
        ), 1

    def open_with(mode="kernels", shares=ALL, runtime=None):
        groups = open_frozen(mode, SHAPE, read, tmp_path, AMPLE, shares, runtime)
        opened.append(groups)
        for layer in LAYERS:
            groups.held(layer, N_GROUPS * T)
        groups.build_all()
        return groups

    yield open_with
    for groups in opened:
        groups.close()


def unscaled(inputs):
    return inputs.queries / np.float32(SCALE)


@pytest.mark.parametrize("mode", ["kernels", "interpreter"])
def test_groups_of_programs_are_one_attention(frozen, inputs, mode):
    groups = frozen(mode)
    asked = groups.ask(7, unscaled(inputs), SCALE, 2, range(N_GROUPS))
    parts = asked.wait()
    assert asked.groups == tuple(parts) == tuple(range(N_GROUPS))
    whole = fold_all(parts[group] for group in asked.groups)
    errors = row_errors(PagePartial(whole.m, whole.l, whole.o), attend_float64(inputs))
    assert max(errors) < BOUNDS["fp32"][0]
    assert asked.keys == N_GROUPS * T and asked.ms > 0


def test_a_query_for_later_groups_gets_no_others(frozen, inputs):
    groups = frozen()
    parts = groups.partials(3, unscaled(inputs), SCALE, 2, 2, 4)
    assert list(parts) == [2, 3]
    part = slice(2 * T, 4 * T)
    oracle = attend_float64(Inputs(inputs.queries, inputs.k[:, part], inputs.v[:, part]))
    whole = fold_all(parts.values())
    assert max(row_errors(PagePartial(whole.m, whole.l, whole.o), oracle)) < 1e-4
    assert groups.partials(3, unscaled(inputs), SCALE, 2, 6, 6) == {}


def test_shares_go_by_the_tokens_of_a_query(frozen, inputs):
    groups = frozen(shares=((1, 0.22), (8, 0.43)))
    one, many = (groups.ask(3, unscaled(inputs), SCALE, n, range(N_GROUPS)).groups for n in (1, 8))
    assert (one, many) == ((0,), (0, 1, 2))  # of 6: 1.3 and 2.6


def test_truncated_and_freed_groups_are_not_claimed(frozen, inputs):
    groups = frozen()
    groups.truncate(3 * T + 1)
    assert groups.ask(3, unscaled(inputs), SCALE, 1, range(N_GROUPS)).groups == (0, 1, 2)
    assert groups.free(1) > 0  # the highest group of the last layer
    layers = [groups.ask(layer, unscaled(inputs), SCALE, 1, range(3)).groups for layer in LAYERS]
    assert layers == [(0, 1, 2), (0, 1)]


class Breaking(KernelRuntime):
    """Every page answers its golden question and nothing after it."""

    def load(self, template, path):
        page = super().load(template, path)
        answer, asked = page.ask, []

        def ask(queries, centre=None):
            asked.append(queries)
            if len(asked) > 1:
                raise RuntimeError("espresso: status -7")
            return answer(queries, centre)

        page.ask = ask
        return page


def test_what_breaks_is_missing_and_reported(frozen, inputs):
    groups = frozen(runtime=Breaking())
    asked = groups.ask(3, unscaled(inputs), SCALE, 1, range(2))
    assert asked.groups == (0, 1) and asked.wait() == {} and asked.keys == 0
    report = msgspec.json.decode(msgspec.json.encode(groups.report()), type=FrozenReport)
    assert report == groups.report() and report.pages == {
        "queued": 0,
        "building": 0,
        "ready": 10,
        "dropped": 0,
        "failed": 2,
    }
    assert report.failed == {"other": 2} and "status -7" in report.first_errors[0]
    assert report.builds == 12 and report.build_s > 0 and report.keys == 0


def test_the_report_counts_what_was_served(frozen, inputs):
    groups = frozen()
    groups.partials(3, unscaled(inputs), SCALE, 1, 0, 2)
    report = groups.report()
    assert report.engine == "kernels" and report.keys == 2 * T and sum(report.asks) == 2
    assert {page[:2] for page in report.page_ms} == {(3, 0), (3, 1)} and report.page_ms[0][2] > 0


def test_settings_say_what_runs_and_how_much(inputs, tmp_path):
    from_settings = {}

    def read(layer, first, n):
        raise EngineError("nothing is kept here")

    for name, more in {"off": {}, "kernels": {"frozen_share": 0.5, "frozen_share_many": 1.0}}.items():
        settings = WorkerSettings(frozen=name, frozen_mib=64, **more)
        from_settings[name] = open_by_settings(settings, SHAPE, read, tmp_path)
    groups = from_settings["kernels"]
    assert from_settings["off"] is None
    groups.held(3, 4 * T)
    while groups.report().pages["failed"] < 4:  # the builder's thread asks for the rows
        time.sleep(0.01)
    assert groups.report().failed == {"rows": 4} and groups.report().engine == "kernels"
    groups.close()


def test_modes_and_sizes_that_cannot_be(tmp_path):
    def rows(layer, first, n):
        raise AssertionError("nothing was held")

    assert open_frozen("off", SHAPE, rows, tmp_path, AMPLE) is None
    odd = FrozenShape(LAYERS, 2, 32, 3, group_tokens=128)
    with pytest.raises(SettingError, match="a group of 128 keys cannot be a frozen page"):
        open_frozen("interpreter", odd, rows, tmp_path, AMPLE)
    if not toolchain.runtime_available():
        with pytest.raises(PageLoadError, match="Core ML runs on macOS"):
            open_frozen("coreml", SHAPE, rows, tmp_path, AMPLE)


def test_completing_attends_what_was_not_given_away_and_what_failed(frozen, inputs):
    attended = []

    def here(run):
        attended.append(run)
        return [ordinary(inputs, group) for group in run]

    groups = frozen(shares=((1, 0.5),))
    whole = fold_all(
        groups.ask(3, unscaled(inputs), SCALE, 1, range(N_GROUPS)).complete(range(N_GROUPS), here)
    )
    assert attended == [range(3, 6)]
    assert max(row_errors(PagePartial(whole.m, whole.l, whole.o), attend_float64(inputs))) < 1e-4


def test_completing_attends_again_what_failed(frozen, inputs):
    attended = []
    asked = frozen(runtime=Breaking()).ask(3, unscaled(inputs), SCALE, 1, range(N_GROUPS))

    def here(run):
        attended.append(run)
        return [ordinary(inputs, group) for group in run]

    whole = fold_all(asked.complete(range(N_GROUPS), here))
    assert asked.groups == tuple(range(N_GROUPS)) and attended == [range(6)]
    assert max(row_errors(PagePartial(whole.m, whole.l, whole.o), attend_float64(inputs))) < 1e-4


def ordinary(inputs, group):
    """One group by arithmetic that is not the product's."""
    part = slice(group * T, (group + 1) * T)
    out, lse = attend_float64(Inputs(inputs.queries, inputs.k[:, part], inputs.v[:, part]))
    return PartialAttention(*(x.astype(np.float32) for x in (lse, np.ones_like(lse), out)))


def test_runs():
    assert runs_of({5, 1, 2, 3, 7}) == [range(1, 4), range(5, 6), range(7, 8)] and runs_of(set()) == []
