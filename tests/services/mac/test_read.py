"""Aim: with the worker, without it, warm, cold, and with a worker that fails in any way, the logits are the same bits.
Method: real engines; the far end is a second engine behind the in-memory twin. Every read is compared with a cold read
of the same token ids on a third engine that never heard of workers or prefixes."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from common.errors import LinkError
from common.wire import messages as m
from common.wire.rows import decode_rows, encode_rows
from services.mac.grid import cut_read
from services.mac.guard import Guard
from services.mac.plan import plan_read
from services.mac.read import Read
from services.mac.remote_span import RemoteSpan
from services.mac.rows_check import TailRows
from services.mac.sequence import HeldSequence
from tests.services.mac.conftest import SPLIT_LAYERS
from tests.services.mac.twin import TailTwin

LENGTHS = (512, 513, 514, 700, 769, 1024)
COLD: dict[tuple[str, bytes], np.ndarray] = {}
"""Logits of cold reads already made."""


class Rig:
    """One host sequence, one twin, one cold oracle."""

    def __init__(self, arch, engines):
        host, far, self.oracle = engines
        self.arch, self.layer = arch, SPLIT_LAYERS[arch]
        self.host = host
        self.sequence = HeldSequence(host, self.layer)
        self.sequence.forget()
        self.twin = TailTwin(far, self.layer)
        self.rows = TailRows(host.spec, self.layer, host.spec.n_layer_full)
        self.tickets, self.epochs = itertools.count(1), itertools.count(1)
        self.failures: list[LinkError] = []
        self.new_link()

    def new_link(self):
        self.remote = RemoteSpan(
            self.twin, self.rows, link_epoch=next(self.epochs), window=2, tickets=self.tickets
        )
        self.sequence.mirror = self.remote.mirror

    def read(self, prompt, **how):
        """Read `prompt` to its end; a failed worker gets a new link afterwards."""
        read = self.begin(prompt, **how)
        while read.logits is None:
            read.advance(0.1)
        if read.fallbacks:
            self.new_link()
        return read

    def begin(self, prompt, *, worker="ready", make_guard=None):
        start = self.sequence.begin(prompt)
        plan = plan_read(start, len(prompt), worker=worker, split_tokens_min=258)
        guard = make_guard(len(plan.ubatches)) if make_guard else None
        return Read(self.sequence, prompt, plan, self.remote, guard=guard, on_fallback=self.failures.append)

    def cold(self, prompt):
        """Last logits of a cold read on the oracle."""
        key = (self.arch, prompt.tobytes())
        if key not in COLD:
            COLD[key] = self._cold(prompt)
        return COLD[key]

    def _cold(self, prompt):
        whole = self.oracle.span(0, self.oracle.spec.n_layer_full)
        whole.truncate(0)
        ubatches = cut_read(0, len(prompt))
        for ubatch in ubatches:
            wanted = "last" if ubatch is ubatches[-1] else "none"
            out = whole.run(prompt[ubatch.position : ubatch.end], ubatch.position, logits=wanted)
        return out[-1]

    def check(self, prompt, **how):
        read = self.read(prompt, **how)
        np.testing.assert_array_equal(read.logits, self.cold(prompt))
        assert self.sequence.whole.n_valid == len(prompt) == read.tokens_done
        return read


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def engines(request, new_engine):
    return request.param, [new_engine(request.param) for _ in range(3)]


@pytest.fixture
def rig(engines):
    rig = Rig(*engines)
    yield rig
    rig.twin.close()


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(0, 512, n).astype(np.int32)


@pytest.mark.parametrize("n", LENGTHS)
def test_a_split_read_gives_the_bits_of_a_cold_read_on_the_host(rig, n):
    read = rig.check(tokens(n))
    assert read.plan.n_remote and rig.twin.tokens_run == read.plan.tokens_worker > 0
    report = read.report()
    assert report.tokens_worker + report.tokens_host + report.tokens_cache == n
    assert report.bypass_reason == "" and report.split_layer == rig.layer
    assert [s.worker_s > 0 for s in report.stages] == [True] * read.plan.n_remote + [False]


@pytest.mark.parametrize(
    "workers",
    [
        ("ready", "ready", "ready"),
        ("ready", "absent", "ready"),
        ("absent", "ready", "absent"),
        ("absent", "absent", "ready"),
    ],
)
def test_a_conversation_keeps_its_bits_whoever_reads_which_part(rig, workers):
    """Turns that grow, answers decoded in between, an edit in the middle, then another conversation."""
    story = tokens(2400)
    edited = np.concatenate([story[:900], tokens(700, seed=5)])
    starts = []
    for prompt, worker in zip((story[:1100], story[:1900], edited), workers, strict=True):
        starts.append(rig.check(prompt, worker=worker).plan.start)
        for position in range(len(prompt), len(prompt) + 3):
            rig.sequence.decode(7, position)
    assert starts == [0, 1024, 768]
    rig.check(tokens(600, seed=9))


def test_the_same_prompt_again_reads_its_last_ubatch_only(rig):
    for n in (700, 768):
        prompt = tokens(n, seed=n)
        rig.check(prompt)
        again = rig.check(prompt)
        assert again.plan.start == 512 and again.plan.n_remote == 0


def test_only_rows_the_mirror_lacks_are_pushed(rig):
    story = tokens(2304)
    rig.check(story[:1024])
    asked_before = len(rig.twin.asked)
    read = rig.check(story)
    assert read.plan.start == 1024
    sync = [message for message in rig.twin.asked[asked_before:] if not isinstance(message, m.RunChunk)]
    # The worker stood at 768: the host ran the last ubatch of the first read itself.
    (push,) = sync
    assert isinstance(push, m.PushRows) and push.n_valid_after == 1024
    rows = 256 * rig.oracle.spec.n_embd_kv * 2 * 2
    n_attention = sum(rig.oracle.spec.kind(i) == "attention" for i in range(rig.layer, rig.rows.last))
    states = sum(s.n_bytes for s in rig.sequence.parts[1].export_rows(0, 0, kv=False, state=True))
    assert push.blob_bytes - n_attention * rows - states < 1024


def test_an_edited_turn_costs_the_worker_a_step_back_and_no_rows(rig):
    """Both ends keep the states of the same points."""
    story = tokens(1900)
    rig.check(story)
    asked_before = len(rig.twin.asked)
    read = rig.check(np.concatenate([story[:1100], tokens(700, seed=6)]))
    assert read.plan.start == 1024 and read.plan.n_remote
    sync = [message for message in rig.twin.asked[asked_before:] if isinstance(message, m.PushRows)]
    assert sync == [] and rig.twin.mirror.n_valid == 1792


def test_regenerating_and_editing_turns_rewinds_the_worker_and_never_syncs_it_from_nothing(rig):
    """States at turn borders came home with their chunks, so the worker has them too, without a word (SNAPSHOT)."""
    end = np.array([511], np.int32)
    first, second = (np.concatenate([tokens(n, seed=n), end]) for n in (1300, 700))
    chat = np.concatenate([first, second])
    edited = np.concatenate([first, tokens(800, seed=3), end])
    rig.check(chat)
    starts, told = [], []
    for prompt in (np.concatenate([chat, tokens(400, seed=4)]), edited, edited):
        asked_before = len(rig.twin.asked)
        starts.append(rig.check(prompt).plan.start)
        told += rig.twin.asked[asked_before:]
    rewinds = [message.n for message in told if isinstance(message, m.RewindMirror)]
    pushed_to = [message.n_valid_after for message in told if isinstance(message, m.PushRows)]
    assert starts == [1792, 1280, 1792 + 256], "all but the last ubatch of what both have"
    assert rewinds == [1280], "the edit; the same prompt again is too short a read for the worker"
    assert pushed_to == [], "both ends keep the states of the same points"
    assert not any(rig.failures)


def test_a_long_push_in_pieces_gives_the_same_bits(rig, monkeypatch):
    """The worker comes late: everything read so far has to be pushed, here one ubatch at a time."""
    monkeypatch.setattr("services.mac.mirror.PUSH_BYTES_MAX", 1)
    story = tokens(2304)
    rig.check(story[:1600], worker="absent")
    read = rig.check(story)
    pushes = [message for message in rig.twin.asked if isinstance(message, m.PushRows)]
    assert [push.n_valid_after for push in pushes] == list(range(256, read.plan.start + 1, 256))
    assert read.plan.start == 1536 and read.plan.n_remote
    whole_state = m.ROWS_KV | m.ROWS_STATE if rig.rows.has_recurrent else m.ROWS_KV
    assert [push.flags for push in pushes] == [m.ROWS_KV] * 5 + [whole_state]


def spoil_nth(n, how):
    """Spoil the n-th ChunkDone with `how`."""
    counter = itertools.count()

    def spoil(answer, blob):
        if isinstance(answer, m.ChunkDone) and next(counter) == n:
            return how(answer, blob)
        return answer, blob

    return spoil


def with_nan(answer, blob):
    """Every bit of the last row set: not a number in any float format."""
    return answer, blob[:-8] + b"\xff" * 8


def as_f32_rows(answer, blob):
    """Twice as many bytes a row, of another type."""
    wide = [
        replace(s, ggml_type=0, row_bytes=2 * s.row_bytes, data=bytes(2 * s.n_bytes))
        for s in decode_rows(blob)
    ]
    blob = bytes(encode_rows(wide).joined())
    return m.ChunkDone(answer.link_epoch, answer.ticket, answer.n_tokens, 1, 0, 1, len(blob)), blob


FAULTS = {
    "another type": as_f32_rows,
    "link lost": lambda a, b: (m.LinkFailed(a.link_epoch, a.ticket, 601, "closed", "cut"), b""),
    "nan": with_nan,
    "short": lambda a, b: (m.ChunkDone(a.link_epoch, a.ticket, a.n_tokens, 1, 0, 1, len(b) - 9), b[:-9]),
    "old epoch": lambda a, b: (m.ChunkDone(0, a.ticket, a.n_tokens, 1, 0, 1, len(b)), b),
    "count": lambda a, b: (m.ChunkDone(a.link_epoch, a.ticket, 3, 1, 0, 1, len(b)), b),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("nth", [1])
def test_a_worker_that_fails_costs_time_only(rig, fault, nth):
    """The fault comes in a read that continues an earlier one, so that undoing means going back and not to nothing."""
    story = tokens(2304)
    rig.check(story[:1100])
    rig.twin.spoil = spoil_nth(nth, FAULTS[fault])
    read = rig.check(story)
    assert len(read.fallbacks) == len(rig.failures) == 1
    # A lost link casts no doubt on rows that are home; of a hybrid, they count from the last state on that came, too.
    kept = read.report().tokens_worker
    assert kept in ((0, 256) if fault in ("link lost", "old epoch") else (0,))
    assert kept or rig.rows.has_recurrent or fault not in ("link lost", "old epoch")
    assert read.report().tokens_returned == 0
    assert read.plan.bypass_reason == ("" if kept else "rested")
    assert len(read.report().stages) == len(read.plan.ubatches)
    rig.twin.spoil = None
    assert rig.check(np.concatenate([story, tokens(250, seed=3)])).plan.start == 2304
    assert rig.check(tokens(800, seed=4)).plan.n_remote


def test_a_channel_that_is_down_before_the_first_chunk_is_a_fallback_too(rig):
    rig.twin.down = True
    assert rig.check(tokens(700)).fallbacks == ["down"]


def test_a_refused_push_is_a_fallback_too(rig):
    story = tokens(2304)
    rig.check(story[:1100], worker="absent")
    rig.twin.spoil = lambda a, b: (m.LinkFailed(a.link_epoch, a.ticket, 401, "memory", "full"), b"")
    assert rig.check(story).fallbacks == ["memory"]


class Scripted(Guard):
    """A guard whose decisions are given: stop after so many chunks, or give up once so many are home."""

    def __init__(self, n_ubatches, *, stop_after=99, give_up_after=99):
        super().__init__(n_ubatches, 1.0, None, time.monotonic)
        self.stop_after, self.give_up_after = stop_after, give_up_after
        self.n_sent = self.n_home = 0

    def sent(self):
        super().sent()
        self.n_sent += 1

    def came_home(self, answer, import_s):
        super().came_home(answer, import_s)
        self.n_home += 1

    def n_more(self, heads_left, n_ready):
        return min(heads_left + n_ready - 1, max(0, self.stop_after - self.n_sent))

    def gives_up(self, heads_left, n_ready, n_redone, elapsed_s):
        return self.n_home >= self.give_up_after


@pytest.mark.parametrize("n_chunks", [0, 1, 3])
@pytest.mark.parametrize("start", [0, 1100])
def test_the_rest_of_a_read_may_stay_on_the_host_from_any_chunk_on(rig, start, n_chunks):
    """Going from what the worker ran to what the host runs changes no bit, now or in the next turn."""
    story = tokens(2304, seed=n_chunks)
    rig.check(story[: max(start, 300)])
    read = rig.check(story, make_guard=lambda n: Scripted(n, stop_after=n_chunks))
    report = read.report()
    assert report.tokens_worker == 256 * n_chunks and report.fallbacks == ()
    assert report.tokens_returned == read.plan.ubatches[-1].position - read.plan.start - 256 * n_chunks
    assert report.bypass_reason == ("" if n_chunks else "slow")
    assert [s.worker_s > 0 for s in report.stages] == [
        index < n_chunks for index in range(len(read.plan.ubatches))
    ]
    rig.check(np.concatenate([story, tokens(250, seed=3)]))


@pytest.mark.parametrize("n_home", [0, 2])
def test_chunks_that_are_out_may_be_given_up(rig, n_home):
    """The answers still come, too late; nothing waits for them and nothing is taken from them."""
    story, held = tokens(2304), threading.Event()
    rig.check(story[:300])
    rig.twin.spoil = spoil_nth(n_home, lambda answer, blob: (held.wait(10), (answer, blob))[1])
    read = rig.check(story, make_guard=lambda n: Scripted(n, give_up_after=n_home))
    report = read.report()
    assert report.tokens_worker == 256 * n_home or (
        rig.rows.has_recurrent and report.tokens_worker < 256 * n_home
    )
    assert report.fallbacks == () and report.tokens_returned > 0 and not held.is_set()
    held.set()
    rig.twin.spoil = None
    rig.check(np.concatenate([story[:1000], tokens(600, seed=8)]))


def test_a_worker_that_stands_still_is_left_behind_by_the_guard_itself(rig):
    """No script: the real guard on the real clock, and an answer that never comes before the read is over."""
    story, held = tokens(2304), threading.Event()
    rig.twin.spoil = spoil_nth(2, lambda answer, blob: (held.wait(10), (answer, blob))[1])
    read = rig.check(story, make_guard=lambda n: Guard(n, 0.5, None, time.monotonic))
    assert read.report().tokens_returned > 0 and not held.is_set()
    held.set()
    rig.twin.spoil = None
    rig.check(story[:1500])


def test_heads_run_while_a_cold_mirror_is_brought_up_to_date(rig):
    """The push is held back until the host has done all it can do without it."""
    story, held = tokens(2304), threading.Event()
    rig.check(story[:1600], worker="absent")
    rig.twin.spoil = lambda answer, blob: (held.wait(10), (answer, blob))[1]
    read = rig.begin(story)
    while not read.waits:
        read.advance(0.0)
    n_heads = len(read.report().stages)
    assert n_heads == len(read.plan.ubatches) > 2 and read.tokens_done == read.plan.start
    held.set()
    while read.logits is None:
        read.advance(0.1)
    np.testing.assert_array_equal(read.logits, rig.cold(story))
    assert read.report().tokens_worker == read.plan.tokens_worker > 0


def test_states_come_home_often_enough_to_bound_what_is_kept(rig, monkeypatch):
    """With room for few residuals, a hybrid's worker is asked for its state in between; a dense one never."""
    monkeypatch.setattr("services.mac.read.KEPT_BYTES_MAX", 1)
    story = tokens(2304)
    read = rig.check(story)
    asked = [
        bool(message.want & m.WANT_STATE) for message in rig.twin.asked if isinstance(message, m.RunChunk)
    ]
    assert read.plan.n_remote == len(asked) == 8
    assert sum(asked) > 2 if rig.rows.has_recurrent else not any(asked)


@pytest.mark.parametrize("n_steps", [3, 6])
def test_after_an_abandoned_read_the_next_one_is_right(rig, n_steps):
    """Chunks of the abandoned read are still running when the next one begins."""
    story = tokens(2048)
    read = rig.begin(story)
    for _ in range(n_steps):
        read.advance(0.1)
    read.abandon()
    rig.check(np.concatenate([story[:1000], tokens(600, seed=8)]))
    rig.check(story)
