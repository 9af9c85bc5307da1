"""Aim: a sequence whose old groups are page programs decodes as the sequence without, whatever becomes of the programs.
Method: a small engine that decodes by pages; logits of the two compared, and to the bit where no program answers.
"""

import time

import numpy as np
import pytest

from common.engine.engine import Decoding, Engine
from common.errors import EngineError
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic
from device.coreml.frozen.runtime import KernelRuntime
from device.frozen_source import FrozenOptions, FrozenSource

N_VOCAB, N_CTX, N_READ, N_DECODED, T = 100, 1024, 600, 6, 256
TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, N_CTX).astype(np.int32)
GEOMETRY = Geometry(
    n_layer=8, n_embd=64, n_ff=64, n_head=4, n_head_kv=2, head_dim=32, state_dim=16, n_vocab=N_VOCAB
)
ALL = ((1, 1.0),)


@pytest.fixture(scope="module", autouse=True)
def coremltools():
    pytest.importorskip("coremltools", reason="needs the extra coreml", exc_type=ImportError)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("frozen") / "model.gguf"
    write_synthetic(GEOMETRY, path, storage="f16")
    with Engine.load(path, n_ctx=N_CTX, decoding=Decoding("paged", 128, 2), device="cpu") as engine:
        yield engine


def read(sequence, tokens=TOKENS, n_read=N_READ):
    span = sequence.span(0, GEOMETRY.n_layer)
    span.truncate(0)
    span.run(tokens[:256], 0)
    span.run(tokens[256:512], 256)
    span.run(tokens[512:n_read], 512)
    return span


def decode(span, tokens=TOKENS, n_read=N_READ):
    positions = range(n_read, n_read + N_DECODED)
    return np.stack([span.run(tokens[p : p + 1], p, "last")[-1] for p in positions])


@pytest.fixture
def plain(engine):
    """Logits by ordinary kernels."""
    sequence = engine.sequence(N_CTX)
    yield lambda *args: decode(read(sequence, *args), *args)
    sequence.close()


@pytest.fixture
def frozen(engine, tmp_path):
    """source(runtime) in front of a sequence of its own."""
    made = []

    def make(mode="interpreter", runtime=None):
        sequence = engine.sequence(N_CTX)
        made.append(
            (sequence, FrozenSource(engine, sequence, FrozenOptions(mode, tmp_path, 1 << 30, ALL, runtime)))
        )
        return made[-1]

    yield make
    for sequence, source in made:
        source.close()
        sequence.close()


def close_to(found, right):
    return np.abs(found - right).max() < 0.02 * right.std()


@pytest.mark.parametrize("mode", ["interpreter", "kernels"])
def test_decoding_with_frozen_pages_is_decoding(plain, frozen, mode):
    sequence, source = frozen(mode)
    assert source.layers == (3, 7)
    span = read(sequence)
    source.build(N_READ)
    found, right = decode(span), plain()
    assert source.keys == len(source.layers) * N_DECODED * 2 * T
    assert close_to(found, right) and not np.array_equal(found, right)


def test_pages_are_built_while_it_decodes(frozen):
    sequence, source = frozen("kernels")
    span = read(sequence)
    decode(span)
    assert source.keys == 0 and source.groups.report().pages["queued"] == 4
    source.groups.build_all()
    span.run(TOKENS[606:607], 606, "last")
    assert source.keys == 4 * T


def test_another_text_after_truncation_is_answered_from_its_own_keys(plain, frozen):
    sequence, source = frozen("kernels")
    read(sequence)
    source.build(N_READ)
    source.truncate(0)
    other = TOKENS[::-1].copy()
    span = read(sequence, other)
    source.build(N_READ)
    assert close_to(decode(span, other), plain(other)) and source.keys > 0


class Refusing(KernelRuntime):
    """Pages that answer their golden question and nothing after it."""

    def load(self, template, path):
        page = super().load(template, path)
        answers = iter([page.ask])
        page.ask = lambda queries, centre=None: next(answers)(queries)
        return page


def test_where_no_program_answers_bits_are_those_of_ordinary_kernels(plain, frozen):
    right = plain()
    idle_sequence, _ = frozen("kernels")
    assert np.array_equal(decode(read(idle_sequence)), right)
    sequence, source = frozen("kernels", Refusing())
    span = read(sequence)
    source.build(N_READ)
    assert source.groups.report().pages["ready"] == 4
    assert np.array_equal(decode(span), right)
    assert source.keys == 0 and source.groups.report().failed == {"other": 4}


def test_closed_it_attends_no_more(plain, engine, tmp_path):
    sequence = engine.sequence(N_CTX)
    source = FrozenSource(engine, sequence, FrozenOptions("kernels", tmp_path, 1 << 30, ALL))
    span = read(sequence)
    source.build(N_READ)
    source.close()
    assert np.array_equal(decode(span), plain()) and source.keys == 0
    sequence.close()
    with pytest.raises(EngineError, match="frozen pages are off"):
        FrozenSource(engine, engine.sequence(512), FrozenOptions("off", tmp_path, 1 << 30))


def test_the_background_builder_serves_a_sequence_that_decodes(plain, frozen):
    """Pages come while tokens are decoded; the logits are those of the sequence without, before and after."""
    sequence, source = frozen("kernels")
    source.groups.start()
    span, right = read(sequence), plain()
    first = span.run(TOKENS[N_READ : N_READ + 1], N_READ, "last")[-1]
    while source.groups.report().pages["ready"] < 4:
        time.sleep(0.01)
    rest = [span.run(TOKENS[p : p + 1], p, "last")[-1] for p in range(N_READ + 1, N_READ + N_DECODED)]
    assert close_to(np.stack([first, *rest]), right)
    assert source.keys >= len(source.layers) * (N_DECODED - 1) * 2 * T
