"""Aim: frozen pages are built, asked, dropped and forgotten as planned, and every failure of a device ends in a page
that is not used, with its first cause, and nothing left behind.

Method: FrozenPages over a device that fails by a script (conftest), on a clock the test moves; answers are compared
with attention in float64 over the keys the pages claim to serve.
"""

import threading

import numpy as np
import pytest

from device.coreml.accuracy import BOUNDS, Inputs, attend_float64, row_errors
from device.coreml.frozen.load_policy import DeviceFacts
from device.coreml.frozen.plan import PageState
from device.coreml.frozen.runtime import InterpreterRuntime, KernelRuntime
from device.coreml.page_program import PagePartial

T = 256
N = 6 * T
MIB = 1 << 20


def build_all(pages, most=50):
    for _ in range(most):
        if pages.builder.build_next() > 0:
            return
    raise AssertionError("the builder never came to rest")


def state_of(pages, page=0, layer=3):
    return next(e for i, e in pages.table.entries.items() if (i.page, i.layer) == (page, layer))


def check_answers(asked, inputs, bound):
    answers = asked.wait()
    assert set(answers) == set(asked.pages)
    for page, partial in answers.items():
        part = slice(page * T, (page + 1) * T)
        oracle = attend_float64(Inputs(inputs.queries, inputs.k[:, part], inputs.v[:, part]))
        assert max(row_errors(partial, oracle)) < bound


@pytest.mark.parametrize("runtime", [KernelRuntime(), InterpreterRuntime()], ids=lambda r: r.engine)
def test_ready_pages_answer_for_their_keys(frozen, inputs, runtime):
    pages = frozen(runtime=runtime, ask_s_max=60.0)
    pages.held(3, N)
    build_all(pages)
    asked = pages.ask(3, inputs.queries, 1, N)
    assert asked.pages == (0, 1, 2, 3)
    check_answers(asked, inputs, BOUNDS["fp32"][0])
    assert pages.ask(7, inputs.queries, 1, N).pages == ()
    report = pages.report()
    assert report.pages == {"queued": 0, "building": 0, "ready": 4, "dropped": 0, "failed": 0}
    assert report.keys_served == 4 * T and report.builds == 4
    assert report.asks[runtime.engine].count == 4 and set(report.page_mean_s) == {(3, p) for p in range(4)}


def test_frozen_pages_and_ordinary_kernels_together_are_one_attention(frozen, inputs):
    """What the worker will do: pages serve their share, the rest is attended elsewhere, the fold is one attention."""
    pages = frozen(runtime=InterpreterRuntime(), shares=((1, 0.4),), ask_s_max=60.0)
    pages.held(3, N - 5)
    build_all(pages)
    asked = pages.ask(3, inputs.queries, 1, N - 5)
    assert asked.pages == (0, 1)
    rest = Inputs(inputs.queries, inputs.k[:, 2 * T : N - 5], inputs.v[:, 2 * T : N - 5])
    out, lse = attend_float64(rest)
    parts = [*asked.wait().values(), PagePartial(lse, np.ones_like(lse), out)]
    m = np.max([p.m for p in parts], axis=0)
    l = sum(p.l * np.exp(p.m - m) for p in parts)  # noqa: E741
    o = sum(p.o * np.exp(p.m - m)[..., None] for p in parts)
    whole = attend_float64(Inputs(inputs.queries, inputs.k[:, : N - 5], inputs.v[:, : N - 5]))
    assert max(row_errors(PagePartial(m, l, o), whole)) < BOUNDS["fp32"][0]


def test_more_rows_than_the_program_takes_are_asked_in_blocks(frozen, inputs):
    pages = frozen(runtime=InterpreterRuntime(), ask_s_max=60.0)
    pages.held(3, T)
    build_all(pages)
    many = np.tile(inputs.queries, (1, 3, 1))[:, :15]
    for _ in range(2):  # uncentred, then centred block by block
        found = pages.ask(3, many, 8, T).wait()[0]
        oracle = attend_float64(Inputs(many, inputs.k[:, :T], inputs.v[:, :T]))
        assert max(row_errors(found, oracle)) < BOUNDS["fp32"][0]


def test_pages_are_built_page_major_within_an_even_budget(frozen):
    pages = frozen(n_pages=2)
    pages.held(7, N)
    pages.held(3, N)
    build_all(pages)
    built = sorted(p.name.rsplit("-", 1)[0] for p in pages._folder.iterdir())
    assert built == ["layer-3-page-0", "layer-3-page-1", "layer-7-page-0", "layer-7-page-1"]
    order = sorted(pages._folder.iterdir(), key=lambda p: int(p.stem.rsplit("-", 1)[1]))
    assert [p.name[: p.name.index("-page")] for p in order] == ["layer-3", "layer-7", "layer-3", "layer-7"]


def test_the_share_limits_what_is_built_and_asked(frozen, inputs):
    pages = frozen(shares=((1, 0.2), (8, 0.5)))
    pages.held(3, N)
    build_all(pages)
    assert pages.report().pages["ready"] == 3
    assert pages.ask(3, inputs.queries, 1, N).pages == (0,)
    assert pages.ask(3, inputs.queries, 8, N).pages == (0, 1, 2)


def test_nothing_is_built_inside_a_query(frozen, inputs):
    pages = frozen()
    pages.held(3, 2 * T)
    pages.builder.build_next()
    entered, leave = threading.Event(), threading.Event()
    loaded = state_of(pages).loaded
    answer = loaded.ask

    def slow(queries, centre=None):
        entered.set()
        assert leave.wait(10)
        return answer(queries, centre)

    loaded.ask = slow
    asked = pages.ask(3, inputs.queries, 1, N)
    assert entered.wait(10)
    builder = threading.Thread(target=pages.builder.build_next)
    builder.start()
    builder.join(0.2)
    assert builder.is_alive() and len(pages.device.loads) == 1
    leave.set()
    builder.join(10)
    assert asked.wait() and len(pages.device.loads) == 2


def test_the_background_builder_builds_and_stops(frozen):
    pages = frozen()
    pages.start()
    pages.held(3, 2 * T)
    with pages.table.changed:
        assert pages.table.changed.wait_for(lambda: pages.report().pages["ready"] == 2, timeout=20)
    pages.close()
    assert not pages.builder._thread.is_alive() and not pages._folder.exists()
    assert all(page.closed for page in pages.device.pages)


def test_memory_pressure_drops_the_highest_pages_and_keys_come_first(frozen, inputs):
    pages = frozen(n_pages=3)
    pages.held(3, N)
    pages.held(7, N)
    build_all(pages)
    pages.state["facts"] = DeviceFacts(1 << 40, 800 * MIB - 1)
    assert pages.builder.build_next() > 0
    assert state_of(pages, 2, 7).state is PageState.DROPPED
    assert pages.report().pages["ready"] == 5 and "memory" in pages.report().postponed
    assert pages.free(1) == pages.template.geometry.weight_bytes
    assert pages.ask(3, inputs.queries, 1, N).pages == (0, 1)
    assert pages.ask(7, inputs.queries, 1, N).pages == (0, 1)
    pages.state["facts"] = DeviceFacts(1 << 40, 1 << 40)
    for _ in range(4):
        pages.builder.build_next()
    assert pages.report().pages["ready"] == 6
    assert pages.device.slots[-1] is not None  # the files of a dropped page were used again


def test_truncation_forgets_pages_and_later_keys_are_built_anew(frozen, inputs):
    pages = frozen()
    pages.held(3, 4 * T)
    build_all(pages)
    pages.truncate(2 * T + 1)
    assert pages.ask(3, inputs.queries, 1, 4 * T).pages == (0, 1)
    assert pages.report().pages["ready"] == 2
    pages.held(3, 4 * T)
    build_all(pages)
    check_answers(pages.ask(3, inputs.queries, 1, 4 * T), inputs, 1e-2)
    assert len(pages.device.loads) == 6


def test_a_page_truncated_while_it_is_built_is_never_used(frozen, inputs):
    pages = frozen()
    pages.held(3, T)
    load = pages.device.load

    def truncating(template, path):
        pages.truncate(0)
        return load(template, path)

    pages.device.load = truncating
    pages.builder.build_next()
    assert pages.ask(3, inputs.queries, 1, N).pages == ()
    assert pages.report().pages == {"queued": 0, "building": 0, "ready": 0, "dropped": 0, "failed": 0}
    pages.close()
    assert all(page.closed for page in pages.device.pages)


# --- a device that fails by cause


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (DeviceFacts(100 * MIB, 1 << 40), "disk"),
        (DeviceFacts(1 << 40, 100 * MIB), "memory"),
        (DeviceFacts(1 << 40, 1 << 40, thermal=2), "thermal"),
    ],
)
def test_a_device_short_of_something_is_left_alone_until_it_recovers(frozen, facts, word):
    pages = frozen()
    pages.held(3, T)
    pages.state["facts"] = facts
    assert pages.builder.build_next() > 0
    assert pages.device.loads == [] and word in pages.report().postponed
    pages.state["facts"] = DeviceFacts(1 << 40, 1 << 40)
    build_all(pages)
    assert pages.report().pages["ready"] == 1 and pages.report().postponed is None


def test_a_failed_compilation_is_tried_once_more_after_the_device_forgot_it(frozen, clock):
    pages = frozen(["compile"])
    pages.held(3, T)
    build_all(pages)
    assert pages.report().pages["queued"] == 1 and len(pages.device.loads) == 1
    clock.now_s += 100  # the device still remembers: nothing may be tried yet
    assert pages.builder.build_next() > 0 and len(pages.device.loads) == 1
    clock.now_s += 140
    build_all(pages)
    assert pages.report().pages["ready"] == 1 and len(pages.device.loads) == 2
    assert pages.device.cleaned == ["layer-3-page-0-0.mlpackage"]


def test_the_first_error_is_reported_not_the_misleading_second(frozen, clock):
    pages = frozen(["compile"], pause_s=10.0)  # a pause shorter than the device's memory
    pages.held(3, T)
    build_all(pages)
    clock.now_s += 10
    build_all(pages)
    report = pages.report()
    assert report.failed == {"compile": 1} and report.first_errors == ("ANECCompile() FAILED (11)",)
    assert len(pages.device.loads) == 2 and len(pages.device.cleaned) == 2
    clock.now_s += 1e6
    build_all(pages)
    assert len(pages.device.loads) == 2


def test_other_pages_are_built_while_one_waits_for_its_retry(frozen, clock):
    pages = frozen(["odd"])
    pages.held(3, 2 * T)
    build_all(pages)
    assert state_of(pages, 0).state is PageState.QUEUED and state_of(pages, 1).state is PageState.READY
    clock.now_s += 240
    build_all(pages)
    assert pages.report().pages["ready"] == 2


@pytest.mark.parametrize(
    ("word", "cause", "text"),
    [
        ("memory", "memory", "not enough memory"),
        ("wrong placement", "placement", "placed on cpu, wanted on neural engine"),
        ("wrong answer", "wrong", "golden answer off by"),
        ("slow", "slow", "golden answer took 5000.0 ms"),
        ("disk full", "disk", "No space left on device"),
    ],
)
def test_failures_that_are_not_tried_again(frozen, inputs, clock, word, cause, text):
    pages = frozen([word])
    pages.held(3, 2 * T)
    build_all(pages)
    clock.now_s += 1e6
    build_all(pages)
    report = pages.report()
    assert report.failed == {cause: 1} and text in report.first_errors[0]
    assert state_of(pages, 1).state is PageState.READY
    assert pages.ask(3, inputs.queries, 1, N).pages == (1,)
    assert f"failed by {cause}: 1" in report.text()


def test_a_load_that_hangs_stops_loading_until_it_returns_and_is_never_used(frozen, inputs):
    pages = frozen(["late"], deadline_s=0.05)
    pages.held(3, 2 * T)
    pages.builder.build_next()
    assert pages.builder.build_next() > 0 and pages.report().postponed == "a load hangs"
    pages.builder._loader._hung.join(10)
    build_all(pages)
    report = pages.report()
    assert report.failed == {"hang": 1} and report.pages["ready"] == 1
    assert pages.device.pages[0].closed and len(pages.device.cleaned) == 1
    assert pages.ask(3, inputs.queries, 1, N).pages == (1,)


def test_a_page_that_breaks_in_use_gives_its_keys_back(frozen, inputs):
    pages = frozen(["breaks later"])
    pages.held(3, 2 * T)
    build_all(pages)
    assert set(pages.ask(3, inputs.queries, 1, N).wait()) == {0, 1}
    asked = pages.ask(3, inputs.queries, 1, N)
    assert asked.pages == (0, 1) and set(asked.wait()) == {1}
    assert pages.ask(3, inputs.queries, 1, N).pages == (1,)
    assert pages.report().failed == {"other": 1}


def test_keys_that_no_program_can_hold_fail_their_page(frozen, rows):
    pages = frozen()
    k, v, kind = rows(3, 0, T)
    v = v.copy()
    v.view(np.float16)[5, 5] = np.inf
    pages.builder._rows = lambda layer, first, n: (k, v, kind)
    pages.held(3, T)
    build_all(pages)
    assert pages.report().failed == {"rows": 1} and pages.device.loads == []
