"""The mirror: every operation succeeds, or leaves it as before or empty, and says which. Real engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.engine import Engine
from common.errors import (
    EngineError,
    LinkDownError,
    ModelError,
    NonFiniteError,
    OutriggerError,
    PositionError,
)
from common.limits import SNAPSHOTS_MAX
from common.wire.messages import ROWS_KV, ROWS_STATE, WANT_LOGITS, WANT_ROWS, WANT_STATE, WANT_TAPS
from device.mirror import TailMirror, _ubatches

from .conftest import N_CTX

EVERYTHING = WANT_ROWS | WANT_STATE
BOTH = ROWS_KV | ROWS_STATE


@pytest.fixture
def mirror(case):
    with Engine.load(case.tail, n_ctx=N_CTX, n_threads=1) as engine:
        mirror = TailMirror(engine)
        mirror.attach(case.first)
        yield mirror


def content(mirror_or_span, n):
    """All rows [0, n) and states, as bytes."""
    span = getattr(mirror_or_span, "span", mirror_or_span)
    return [(str(s), bytes(np.ascontiguousarray(s.data))) for s in span.export_rows(0, n)]


def test_chunks_leave_what_the_whole_model_would(case, mirror):
    span, position = case.span, 0
    for n_tokens in (256, 256, 37):
        residual = case.residual(n_tokens, seed=position)
        ran = mirror.run(residual, position, EVERYTHING | WANT_LOGITS)
        assert np.array_equal(ran.logits, span.run(residual, position, logits="last")[0])
        ours = span.export_rows(position, position + n_tokens)
        assert [str(s) for s in ran.sections] == [str(s) for s in ours]
        assert all(np.array_equal(a.data, b.data) for a, b in zip(ran.sections, ours, strict=True))
        position += n_tokens
    assert mirror.n_valid == position
    assert content(mirror, position) == content(span, position)


def test_a_long_chunk_is_cut_on_the_grid(case, mirror):
    residual = case.residual(256 + 256 + 40)
    mirror.run(residual[:100], 0, 0)
    mirror.run(residual[100:], 100, 0)
    span = case.span
    for begin, end in ((0, 100), (100, 256), (256, 512), (512, 552)):
        span.run(residual[begin:end], begin)
    assert content(mirror, 552) == content(span, 552)


@given(st.integers(0, 2000), st.integers(1, 2000), st.sampled_from([16, 256]))
def test_cuts_lie_on_the_grid_and_leave_no_single_row(start, n_tokens, n_ubatch):
    pieces = list(_ubatches(start, start + n_tokens, n_ubatch))
    assert pieces[0][0] == start and pieces[-1][1] == start + n_tokens
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert all(0 < end - begin <= n_ubatch for begin, end in pieces)
    for _, end in pieces[:-2]:
        assert end % n_ubatch == 0
    if n_tokens > 2 and len(pieces) > 1 and pieces[-1][1] - pieces[-1][0] == 1:
        assert pieces[-2][1] - pieces[-2][0] == 1, "only a single row before it cannot give one up"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda r: (r, 5, 0), PositionError),
        (lambda r: (np.repeat(r, 40, axis=0), 10, 0), PositionError),
        (lambda r: (r, 10, WANT_TAPS), EngineError),
        (lambda r: (r * np.float32(np.inf), 10, 0), NonFiniteError),
        (lambda r: (np.where(r > 2, np.nan, r).astype(np.float32), 10, 0), NonFiniteError),
    ],
    ids=["position", "context", "taps", "inf", "nan"],
)
def test_a_chunk_that_cannot_be_run_changes_nothing(case, mirror, change, error):
    mirror.run(case.residual(10), 0, 0)
    before = content(mirror, 10)
    with pytest.raises(error):
        mirror.run(*change(case.residual(30, seed=1)))
    assert mirror.n_valid == 10
    assert content(mirror, 10) == before


def test_a_failure_in_the_middle_of_a_chunk_is_undone(case, mirror, monkeypatch):
    """The second ubatch of a chunk fails in the engine: attention layers go back, a hybrid's mirror is emptied."""
    residual = case.residual(600)
    mirror.run(residual[:200], 0, 0)
    before = content(mirror, 200)
    real, calls = mirror.engine.graphs.run, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 2:
            raise EngineError("the backend said no")
        return real(*args)

    monkeypatch.setattr(mirror.engine.graphs, "run", failing)
    with pytest.raises(EngineError, match="said no"):
        mirror.run(residual[200:], 200, 0)
    monkeypatch.undo()
    if mirror.has_recurrent:
        assert mirror.n_valid == 0
        mirror.run(residual[:200], 0, 0)
    assert mirror.n_valid == 200
    assert content(mirror, 200) == before


def test_a_long_chunk_nobody_waits_for_ends_at_the_next_ubatch(case, mirror):
    answers = iter([False, True])
    with pytest.raises(LinkDownError, match=r"\[256, 600\)"):
        mirror.run(case.residual(600), 0, 0, gone=lambda: next(answers))
    assert mirror.n_valid == 0


def test_rows_pushed_are_rows_computed(case, mirror):
    span, residual = case.span, case.residual(300)
    span.run(residual[:256], 0)
    span.run(residual[256:], 256)
    mirror.sync(span.export_rows(0, 300, kv=True, state=True), BOTH, 300)
    assert mirror.n_valid == 300
    assert content(mirror, 300) == content(span, 300)
    more = case.residual(20, seed=9)
    ran = mirror.run(more, 300, WANT_LOGITS)
    assert np.array_equal(ran.logits, span.run(more, 300, logits="last")[0])


def test_rows_may_come_in_pieces_with_the_state_at_the_end(case, mirror):
    span, residual = case.span, case.residual(200)
    span.run(residual, 0)
    mirror.sync(span.export_rows(0, 90, kv=True, state=False), ROWS_KV, 90)
    assert mirror.n_valid == (0 if mirror.has_recurrent else 90)
    mirror.sync(span.export_rows(90, 200, kv=True, state=True), BOTH, 200)
    assert mirror.n_valid == 200
    assert content(mirror, 200) == content(span, 200)


def test_rows_that_do_not_fit_change_nothing(case, mirror):
    span = case.span
    span.run(case.residual(100), 0)
    mirror.run(case.residual(50), 0, 0)
    before = content(mirror, 50)
    sections = span.export_rows(0, 100)
    with pytest.raises(EngineError, match="do not announce"):
        mirror.sync(sections, 0, 100)
    with pytest.raises(OutriggerError):
        mirror.sync(sections, BOTH, 2000)
    with pytest.raises(OutriggerError):
        mirror.sync(span.export_rows(60, 100), BOTH, 100)
    assert content(mirror, 50) == before


def test_rewinding_goes_to_the_newest_point_that_can_be_reached(case, mirror):
    residual = case.residual(300)
    mirror.run(residual[:100], 0, 0)
    mirror.snapshot(100)
    at_100 = content(mirror, 100)
    mirror.run(residual[100:300], 100, 0)
    assert mirror.rewind(400) == 300
    expected = 100 if mirror.has_recurrent else 150
    assert mirror.rewind(150) == expected
    assert content(mirror, 100)[: len(at_100)] == at_100
    mirror.rewind(100)
    mirror.run(residual[100:300], 100, 0)
    assert mirror.rewind(99) == (0 if mirror.has_recurrent else 99)
    assert mirror.rewind(0) == 0


def test_a_snapshot_is_kept_where_the_mirror_stands_and_only_some_are(case, mirror):
    with pytest.raises(PositionError):
        mirror.snapshot(3)
    for position in range(SNAPSHOTS_MAX + 2):
        mirror.run(case.residual(2), 2 * position, 0)
        mirror.snapshot(2 * position + 2)
    if mirror.has_recurrent:
        assert mirror.rewind(7) == 6
        assert mirror.rewind(5) == 0, "the two oldest are gone"


def test_states_that_crossed_the_cable_are_kept_without_asking(case, mirror):
    """A chunk that was asked for its state, a pull, a push: the host keeps the same points, so the worker does."""
    mirror.run(case.residual(100), 0, EVERYTHING)
    mirror.run(case.residual(100), 100, WANT_ROWS)
    mirror.run(case.residual(50), 200, 0)
    mirror.rows(0, 250, BOTH)
    mirror.run(case.residual(50), 250, 0)
    mirror.sync(mirror.rows(300, 300, BOTH), BOTH, 300)
    mirror.run(case.residual(50), 300, 0)
    points = (350, 300, 250, 100) if mirror.has_recurrent else (350, 320, 260, 210)
    assert [mirror.rewind(n) for n in (350, 320, 260, 210)] == list(points)
    assert mirror.rewind(99) == (0 if mirror.has_recurrent else 99)


def test_kept_states_stay_within_their_bytes(case):
    with Engine.load(case.tail, n_ctx=N_CTX, n_threads=1) as engine:
        for n_bytes, goes_back_to in ((1, 0), (1 << 30, 4)):
            mirror = TailMirror(engine, n_bytes)
            mirror.attach(case.first)
            for position in range(3):
                mirror.run(case.residual(2), 2 * position, EVERYTHING)
            assert mirror.rewind(5) == (goes_back_to if mirror.has_recurrent else 5)


def test_layers_outside_the_file_are_refused_with_the_remedy(case, mirror):
    for first in (0, case.first - 1, case.spec.n_layer_full):
        if first < case.first or first == case.spec.n_layer_full:
            with pytest.raises(ModelError, match=f"-L {first} TAIL"):
                mirror.attach(first)
    mirror.attach(case.first + 1)
    assert mirror.span.first == case.first + 1


def test_logits_need_the_output(case, tmp_path):
    from common.model.split import write_tail

    write_tail(case.whole, case.first, tmp_path / "headless.gguf", head=False)
    with Engine.load(tmp_path / "headless.gguf", n_ctx=512, n_threads=1) as engine:
        mirror = TailMirror(engine)
        mirror.attach(case.first)
        with pytest.raises(EngineError, match="no output head"):
            mirror.run(case.residual(4), 0, WANT_LOGITS)
        assert mirror.run(case.residual(4), 0, WANT_ROWS).sections
