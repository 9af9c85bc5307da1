"""Aim: over any course of a chat, a warm read gives the bits of a cold one and reads little more than what is new.
Method: a state machine of hypothesis drives one real sequence (with the twin as worker, or without) through turns,
answers, idle time, regenerated, edited and shortened turns, other chats and short memory; a third engine reads each
prompt from nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.limits import UBATCH_TOKENS
from services.mac.grid import common_prefix
from services.mac.sequence import HeldSequence, state_bytes
from tests.services.mac.test_read import Rig

END = 511
"""The token that ends a turn."""
ROOM = 1800
"""Tokens a chat may have; what is longer is cut at the front, as a client does."""

near_grid = st.builds(lambda k, d: max(2, k * 256 + d), st.integers(0, 2), st.integers(-2, 3))
lengths = near_grid | st.integers(2, 600)


def text(n, seed):
    """Token ids i32 [n] without END."""
    return np.random.default_rng(seed).integers(0, END, n).astype(np.int32)


class Chats(RuleBasedStateMachine):
    """`chat` is what the client holds; `rig.sequence` what the host holds."""

    def __init__(self, engines):
        super().__init__()
        self.rig = Rig(*engines)
        self.seeds = iter(range(10**6))
        self.chat = self.asked = np.empty(0, np.int32)
        self.held = self.chat
        """The prompt and answer that came last."""
        self.all_at_hand = False
        """Nothing was lost of `held`: states fit, and idle time was given."""
        self.n_points = None

    def teardown(self):
        self.rig.twin.close()

    def turn(self, n, seed):
        return np.append(text(n, seed), np.int32(END))

    @initialize(n=lengths, points=st.sampled_from([2, 5, 100]))
    def open(self, n, points):
        """The cap of kept states: scarce, some, plenty."""
        rig = self.rig
        old = rig.sequence
        each = max(1, state_bytes(old.spec))
        rig.sequence = HeldSequence(rig.host, rig.layer, snapshot_bytes=points * each)
        rig.sequence.forget()
        rig.new_link()
        self.n_points = points
        self.chat = self.asked = self.turn(n, next(self.seeds))

    @rule(n_new=lengths, n_answer=st.integers(0, 40), worker=st.sampled_from(["ready", "absent"]))
    def ask(self, n_new, n_answer, worker):
        """A user's turn, and an answer."""
        self.chat = np.concatenate([self.chat, self.turn(n_new, next(self.seeds))])[-ROOM:]
        self.read(worker, n_answer)

    @rule(n_answer=st.integers(0, 300), worker=st.sampled_from(["ready", "absent"]))
    def regenerate(self, n_answer, worker):
        """The same prompt again, without the answer it got."""
        self.chat = self.asked
        self.read(worker, n_answer)

    @rule(share=st.floats(0, 1), n_new=lengths, worker=st.sampled_from(["ready", "absent"]))
    def edit(self, share, n_new, worker):
        """Something earlier is written anew, and what came after it is gone."""
        at = int(share * len(self.chat))
        self.chat = np.concatenate([self.chat[:at], self.turn(n_new, next(self.seeds))])[-ROOM:]
        self.read(worker, 3)

    @rule(share=st.floats(0, 1), n_gone=st.integers(1, 300), worker=st.sampled_from(["ready", "absent"]))
    def drop(self, share, n_gone, worker):
        """A template leaves out reasoning of an earlier turn; what came after it stays."""
        at = int(share * len(self.chat))
        left = np.concatenate([self.chat[:at], self.chat[at + n_gone :]])[-ROOM:]
        self.chat = left if len(left) > 1 else self.turn(20, next(self.seeds))
        self.read(worker, 3)

    @rule(n_ubatches=st.integers(1, 3))
    def little_time(self, n_ubatches):
        for _ in range(n_ubatches):
            if self.rig.sequence.n_provisional:
                self.rig.sequence.advance_canonical()

    @rule()
    def much_time(self):
        while self.rig.sequence.n_provisional:
            self.rig.sequence.advance_canonical()
        self.all_at_hand = self.n_points >= 100 or not self.rig.sequence.has_recurrent

    @precondition(lambda self: self.rig.sequence.has_recurrent)
    @rule()
    def memory_runs_short(self):
        self.rig.sequence.snapshots.shed()
        self.all_at_hand = False

    def read(self, worker, n_answer):
        """Read the chat, compare with a cold read, and write an answer of made-up tokens."""
        rig, prompt = self.rig, self.chat
        self.asked = prompt
        n_new = max(1, len(prompt) - common_prefix(self.held, prompt))
        read = rig.check(prompt, worker=worker)
        assert read.report().tokens_cache == read.plan.start
        if self.all_at_hand:
            assert len(prompt) - read.plan.start <= n_new + UBATCH_TOKENS
        assert len(rig.sequence.snapshots.points) <= self.n_points + 1
        answer = text(n_answer, next(self.seeds))
        for offset, token in enumerate(answer[:-1][:4]):
            rig.sequence.decode(int(token), len(prompt) + offset)
        rig.sequence.answered(answer.tolist())
        self.chat = self.held = np.concatenate([prompt, answer])
        self.all_at_hand = False


@pytest.fixture(scope="module", params=["llama", "qwen35"])
def engines(request, new_engine):
    return request.param, [new_engine(request.param) for _ in range(3)]


def test_a_chat_of_any_course_is_read_warm_with_the_bits_of_a_cold_read(engines):
    run_state_machine_as_test(
        lambda: Chats(engines),
        settings=settings(
            max_examples=10,
            stateful_step_count=10,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
