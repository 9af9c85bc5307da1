"""Aim: converted programs compute what the model computes, at every position, however a text is cut into calls.

Method: a tiny Gemma 3 (two KV heads, one global layer, window 64) is converted, and the saved packages are executed by
the interpreter as an app would: residuals after every chunk against the float64 forward, logits, batch remainders, both
functions interleaved, across the window and beyond. Limits are stated here; argmax alone is never the measure.
"""

import numpy as np
import pytest

from device.coreml.convert.conversation import Conversation
from device.coreml.convert.forward import Forward
from device.coreml.convert.palette import Lut, palettise
from device.coreml.convert.proof import closeness, distance, prove
from device.coreml.reference import Arithmetic, Package
from tests.device.coreml.convert.conftest import BATCH, N_LAYER, WINDOW

FP16_MAX_DISTANCE = 2e-2
"""Of residuals from float64: seven random layers, rounded to fp16 at every operation."""
FP16_KL_MAX = 1e-3
LUTS = (Lut(8), Lut(4, 8), Lut(6, 4))


@pytest.fixture(scope="module")
def expected(tiny, text):
    """float64 residuals: after the embedding, then after each layer."""
    return list(Forward(tiny).residuals(text))


def read(talk, text, plan):
    """Residuals of the last chunk; `plan` lists (tokens, one by one?) over one state."""
    talk.restart()
    rows, at = [], 0
    for n, one_by_one in plan:
        rows.append(talk.read(text[at : at + n], one_by_one)[-1])
        at += n
    return np.concatenate(rows)


def test_every_layer_equals_float64_across_the_window(make_bundle, tiny, text, expected):
    talk = Conversation(make_bundle(192, chunks=N_LAYER))
    found = talk.read(text)
    for layer in range(N_LAYER - 1):
        assert distance(found[layer], expected[layer + 1]) < FP16_MAX_DISTANCE
    assert distance(found[-1], Forward(tiny).norm(expected[-1], "norm")) < FP16_MAX_DISTANCE
    assert talk.chunks[0].functions == ("infer", "infer_rotate", "prefill", "prefill_rotate")


@pytest.mark.parametrize("remainder", [1, 2, 31, 63, 64])
def test_a_partial_last_batch_is_one_call_and_leaves_no_trace(make_bundle, tiny, text, expected, remainder):
    talk = Conversation(make_bundle(192))
    n = BATCH + remainder
    normed = Forward(tiny).norm(expected[-1], "norm")
    found = read(talk, text, [(n, False), (3, True)])
    assert distance(found, normed[: n + 3]) < FP16_MAX_DISTANCE


def test_functions_interleave_and_equal_repeated_infer(make_bundle, tiny, text, expected):
    talk = Conversation(make_bundle(192))
    mixed = [(1, False), (2, True), (61, False), (31, False), (5, True), (64, False), (16, False)]
    single = read(talk, text, [(len(text), True)])
    found = read(talk, text, mixed)
    assert distance(found, single.astype(np.float64)) < FP16_MAX_DISTANCE
    assert distance(single, Forward(tiny).norm(expected[-1], "norm")) < FP16_MAX_DISTANCE


def test_writing_a_position_twice_changes_nothing(make_bundle, text):
    """Apps read a prompt and then run its last token again to get logits."""
    talk = Conversation(make_bundle(192))
    first = talk.read(text[:130])[-1]
    talk.n -= 1
    again = talk.read(text[129:130], one_by_one=True)[-1]
    assert distance(again, first[-1:].astype(np.float64)) < FP16_MAX_DISTANCE


def test_a_state_used_again_from_the_start_remembers_nothing(make_bundle, text):
    talk = Conversation(make_bundle(192))
    fresh = talk.read(text[:70])[-1]
    talk.read(text[70:])
    talk.n = 0
    assert np.array_equal(talk.read(text[:70])[-1], fresh)


def test_a_context_within_the_window_has_one_cache(make_bundle, tiny, text, expected):
    talk = Conversation(make_bundle(WINDOW))
    assert set(talk.state) == {"kv_cache_0"}
    assert talk.chunks[0].functions == ("infer", "prefill")
    found = read(talk, text, [(50, False), (14, True)])
    assert distance(found, Forward(tiny).norm(expected[-1], "norm")[:64]) < FP16_MAX_DISTANCE


def test_the_window_is_kept(make_bundle, tiny, text):
    """A converter that lost the window would pass every test that is shorter than it."""
    from dataclasses import replace

    unlimited = Forward(replace(tiny, window=10_000))
    wrong = unlimited.norm(list(unlimited.residuals(text))[-1], "norm")
    found = Conversation(make_bundle(192)).read(text)[-1]
    assert distance(found[:WINDOW], wrong[:WINDOW]) < FP16_MAX_DISTANCE
    assert distance(found[-20:], wrong[-20:]) > 5 * FP16_MAX_DISTANCE


@pytest.mark.parametrize("accumulator", ["fp32", "block64"])
def test_a_proof_of_the_whole(make_bundle, tiny, text, accumulator):
    proof = prove(tiny, make_bundle(192), text, 4, 16, Arithmetic(accumulator))
    assert max(proof.residual_errors) < FP16_MAX_DISTANCE
    assert proof.prefill_vs_infer < FP16_MAX_DISTANCE
    assert proof.closeness.kl_max < FP16_KL_MAX
    assert proof.closeness.top1 > 0.9


def test_palettised_programs_compute_with_their_palettes(make_bundle, tiny, text):
    """Against a forward that has the palettes' weights the distance is that of fp16, not that of palettes."""
    talk = Conversation(make_bundle(192, luts=LUTS))
    table = palettise(tiny.rows("embed").astype(np.float16), LUTS[0]).dense()
    forward = Forward(tiny, weights=lambda name, w: palettise(w.astype(np.float16), LUTS[1]).dense())
    start = table[text].astype(np.float64) * tiny.embedding_scale
    normed = forward.norm(list(forward.residuals(text, start))[-1], "norm")
    found = talk.read(text)[-1]
    assert distance(found, normed) < FP16_MAX_DISTANCE
    plain = Forward(tiny)
    assert distance(found, plain.norm(list(plain.residuals(text))[-1], "norm")) > FP16_MAX_DISTANCE
    head = palettise(tiny.rows("head").astype(np.float16), LUTS[2]).dense().astype(np.float64)
    assert closeness(talk.logits(found[-8:]), found[-8:].astype(np.float64) @ head.T).kl_max < FP16_KL_MAX


def test_a_scaled_residual_changes_nothing_else(make_bundle, tiny, text, expected):
    found = Conversation(make_bundle(WINDOW, scale=2.0**-5)).read(text[:60])
    assert distance(found[0] * 32.0, expected[3][:60]) < FP16_MAX_DISTANCE
    assert distance(found[-1], Forward(tiny).norm(expected[-1], "norm")[:60]) < FP16_MAX_DISTANCE


def test_functions_share_their_weights(make_bundle, tiny):
    folder = make_bundle(192)
    chunk = next(iter(sorted(folder.glob("*FFN*chunk_01of02.mlpackage"))))
    matrices = sum(tiny.layer_weights(layer) for layer in range(3))
    assert Package(chunk).weight_path.stat().st_size < 2 * matrices * 1.4  # tables, gains, alignment
