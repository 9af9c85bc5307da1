"""Aim: with the head layers alone on the host, answers are those of the whole model, bit for bit: through new turns,
edits, and a worker that is lost at any moment; what split decode cannot do it refuses by name.
Method: the real compute loop over an engine that holds the head only, the twin as worker. Tokens and log-probabilities
are compared with a whole engine that never heard of splits."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest

from common.engine.engine import Decoding, Engine
from common.errors import (
    EngineError,
    LinkDownError,
    ModelError,
    UnsupportedParameterError,
    WorkerRefusedError,
)
from common.ggml.logits import logprobs
from common.model.spec import ModelSpec
from common.wire import messages as m
from services.mac.compute import Compute
from services.mac.grid import cut_read
from services.mac.requests import RequestQueue
from services.mac.split_decode import SplitDecoding
from services.mac.tally import Tally
from services.mac.worker import LinkView, Worker
from tests.services.mac.conftest import N_CTX, SPLIT_LAYERS
from tests.services.mac.twin import TailTwin


class Rig:
    """A host of the head layers, a twin of the rest, and a whole engine as the oracle."""

    def __init__(self, layer, engines, wait_s=30.0):
        self.host, far, self.oracle = engines
        self.spec = self.oracle.spec
        self.host.span(0, layer).truncate(0)
        self.twin = TailTwin(far, layer)
        self.queue, self.events = RequestQueue(), queue.SimpleQueue()
        self.worker = Worker(layer, rest_s=0.0)
        self.worker.link = LinkView("ready", 1, n_ctx=N_CTX)
        self.reports = []
        self.losses = 0
        decoding = SplitDecoding(
            self.spec,
            N_CTX,
            self.worker,
            self.twin,
            Tally(),
            wait_s=wait_s,
            on_link_failure=self.lost,
            on_read=self.reports.append,
        )
        self.decoding = decoding
        self.compute = Compute(
            self.host,
            self.queue,
            self.worker,
            lambda _request, message: self.events.put(message),
            decoding,
            canonical=False,
        )
        self.thread = self.compute.start()

    def lost(self, _error):
        """What bridge and tether do: a moment later the worker is greeted anew, and knows nothing any more."""
        self.losses += 1
        epoch = self.worker.link.epoch + 1
        self.worker.link = LinkView("connecting")
        self.twin.spoil = None
        threading.Timer(0.05, lambda: self.meet(epoch)).start()

    def meet(self, epoch):
        self.twin.restart()
        self.worker.link = LinkView("ready", epoch, n_ctx=N_CTX)

    def ask(self, prompt, max_tokens=6, name="r", **more):
        more = {"top_logprobs": 2} | more
        ask = m.Generate(name, len(prompt), max_tokens, m.Sampling(), (), 60.0, 200, **more)
        self.queue.submit(ask, prompt, b"peer")

    def end(self):
        """Everything told up to the end of the request."""
        seen = []
        while not seen or not isinstance(seen[-1], m.Finished | m.Failed):
            seen.append(self.events.get(timeout=60))
        return seen

    def check(self, prompt, max_tokens=6):
        """Ask, compare every token and its log-probabilities with the oracle's; returns the report and the tokens."""
        self.ask(prompt, max_tokens)
        seen = self.end()
        assert isinstance(seen[-1], m.Finished), seen[-1]
        ready = [event for event in seen if isinstance(event, m.TokenReady)]
        right = self.right(prompt, max_tokens)
        assert [(each.token_id, each.logprobs.logprob, each.logprobs.top) for each in ready] == right
        return seen[-1].report, np.array([each.token_id for each in ready], np.int32)

    def right(self, prompt, max_tokens):
        whole = self.oracle.span(0, self.spec.n_layer_full)
        whole.truncate(0)
        for piece in cut_read(0, len(prompt)):
            out = whole.run(prompt[piece.position : piece.end], piece.position, logits="last")
        found = []
        while True:
            token_id = int(out[-1].argmax())
            told = logprobs(out[-1], token_id, 2)
            found.append((token_id, told.chosen, told.top))
            if len(found) == max_tokens:
                return found
            out = whole.run(np.array([token_id], np.int32), len(prompt) + len(found) - 1, logits="last")

    def close(self):
        self.queue.close()
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()
        self.twin.close()


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def loaded(request, tiny_models):
    """Split layer, and the engines of a host, a worker and an oracle."""
    load = dict(n_ctx=N_CTX, n_threads=1, device="cpu", decoding=Decoding("fused"))
    path, layer = tiny_models[request.param], SPLIT_LAYERS[request.param]
    engines = [Engine.load(path, last=last, **load) for last in (layer, None, None)]
    yield layer, engines
    for engine in engines:
        engine.close()


@pytest.fixture
def rig(loaded):
    rig = Rig(*loaded)
    yield rig
    rig.close()


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 512, n).astype(np.int32)


def fail_once(n, kind=m.ChunkDone):
    """A spoil that turns the n-th answer of a kind from now on, and all after it, into the loss of the link."""
    left = [n]

    def spoil(answer, blob):
        left[0] -= isinstance(answer, kind)
        if left[0] > 0:
            return answer, blob
        return m.LinkFailed(answer.link_epoch, answer.ticket, LinkDownError.code, "down", "cut"), b""

    return spoil


def test_the_head_alone_is_loaded(tiny_models):
    path, layer = tiny_models["llama"], SPLIT_LAYERS["llama"]
    with Engine.load(path, n_ctx=512) as whole, Engine.load(path, n_ctx=512, last=layer) as head:
        assert head.spec.layers == range(layer) and head.spec.n_layer_full == 3
        assert (
            sum(head.describe()["weights"].values())
            == 1 + 9 * layer
            < sum(whole.describe()["weights"].values())
        )
        assert head.describe()["state_bytes"] * 3 == whole.describe()["state_bytes"] * layer
        ids = tokens(20)
        there = whole.span(0, layer).run(ids, 0)
        assert (head.span(0, layer).run(ids, 0) == there).all()
        with pytest.raises(EngineError, match=r"layers \[0, 3\) are not in"):
            head.span(0, 3)
    with pytest.raises(ModelError, match="no head"):
        ModelSpec.read(path).head(3)


def test_every_token_is_that_of_the_whole_model_and_nothing_of_the_tail_comes_home(rig):
    prompt = tokens(700)
    report, _ = rig.check(prompt, max_tokens=9)
    assert (report.tokens_worker, report.tokens_host, report.tokens_cache) == (700, 0, 0)
    assert report.decode_head_s > 0 and report.decode_worker_s > 0
    assert report.decode_head_s + report.decode_worker_s < report.decode_s
    chunks = [message for message in rig.twin.asked if isinstance(message, m.RunChunk)]
    assert [chunk.n_tokens for chunk in chunks] == [256, 256, 188] + [1] * 8
    assert [chunk.want for chunk in chunks] == [0, 0] + [m.WANT_LOGITS] * 9
    assert rig.losses == 0 and len(rig.reports) == 1 and len(rig.reports[0].stages) == 3


@pytest.mark.parametrize("n_prompt", [1, 255, 257])
def test_prompts_at_the_edges_of_the_grid(rig, n_prompt):
    rig.check(tokens(n_prompt, seed=n_prompt), max_tokens=3)


def test_new_turns_edits_and_repeats_reuse_rows_on_both_sides(rig):
    first = tokens(1100)
    _, answer = rig.check(first, max_tokens=5)
    turn = np.concatenate([first, answer, tokens(300, seed=1)])
    report, _ = rig.check(turn)
    assert report.tokens_cache == 1024
    report, _ = rig.check(turn)
    assert report.tokens_cache == 1280
    edited = np.concatenate([turn[:800], tokens(400, seed=2)])
    report, _ = rig.check(edited)
    assert report.tokens_cache == 768 and rig.losses == 0
    assert not any(isinstance(message, m.PushRows) for message in rig.twin.asked)
    report, _ = rig.check(tokens(600, seed=3))
    assert report.tokens_cache == 0


def test_a_worker_that_kept_no_state_makes_the_head_go_back_as_far(rig):
    """The snapshots of the far end are gone, say for lack of memory: what lies between is read again."""
    turn = tokens(1100)
    rig.check(turn)
    rig.twin.mirror._snapshots.clear()
    report, _ = rig.check(np.concatenate([turn[:600], tokens(300, seed=1)]))
    assert report.tokens_cache == (0 if rig.spec.arch == "qwen35" else 512) and rig.losses == 0


@pytest.mark.parametrize("n", [1, 3, 4, 8], ids=["first chunk", "last chunk", "first token", "mid-decode"])
def test_a_worker_lost_at_any_moment_comes_back_to_the_same_bits(rig, n):
    rig.twin.spoil = fail_once(n)
    report, _ = rig.check(tokens(700, seed=n), max_tokens=9)
    assert rig.losses == 1 and report.fallbacks == ("down",) and report.tokens_worker == 700
    assert report.tokens_reread == (0 if n == 1 else 700 + n - 4 if n > 3 else 512)
    rig.check(np.concatenate([tokens(700, seed=n), tokens(90)]))


def test_a_worker_that_gives_wrong_logits_is_not_believed(rig):
    def spoil(answer, blob):
        if isinstance(answer, m.ChunkDone) and answer.n_logits:
            return m.ChunkDone(
                answer.link_epoch, answer.ticket, answer.n_tokens, 1, 0, 1, 0, n_logits=5
            ), blob
        return answer, blob

    rig.twin.spoil = spoil
    report, _ = rig.check(tokens(100))
    assert report.fallbacks == ("count",) and rig.losses == 1


def test_a_cancelled_answer_leaves_both_sides_usable(rig):
    rig.ask(tokens(700), max_tokens=500)
    while not isinstance(rig.events.get(timeout=60), m.TokenReady):
        pass
    rig.queue.cancel(b"peer", "r")
    assert rig.end()[-1].reason == "cancelled"
    report, _ = rig.check(np.concatenate([tokens(700), tokens(50, seed=1)]))
    assert report.tokens_cache == 512 and rig.losses == 0


def test_what_it_cannot_do_it_refuses_by_name(loaded):
    rig = Rig(*loaded, wait_s=0.1)
    try:
        rig.ask(tokens(20), n_choices=2)
        failed = rig.end()[-1]
        assert failed.code == UnsupportedParameterError.code and "one answer" in failed.detail
        rig.worker.link = LinkView("absent", detail="no cable")
        started = time.monotonic()
        rig.ask(tokens(20))
        failed = rig.end()[-1]
        assert (
            failed.code == LinkDownError.code
            and "no cable" in failed.detail
            and "needs the worker" in failed.detail
        )
        assert time.monotonic() - started >= 0.1
        rig.worker.link = LinkView("refused", detail="another model")
        rig.ask(tokens(20))
        failed = rig.end()[-1]
        assert failed.code == WorkerRefusedError.code and "another model" in failed.detail
        rig.worker.link = LinkView("ready", 5, n_ctx=512)
        rig.ask(tokens(20))
        failed = rig.end()[-1]
        assert failed.code == WorkerRefusedError.code and "--worker-ctx 2560" in failed.detail
        rig.meet(6)
        rig.check(tokens(20))
    finally:
        rig.close()
