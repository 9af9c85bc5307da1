"""Aim: the check of a bundle says what was found and what was not run; loads follow the policy, by cause.

Method: the tiny bundle by the interpreter, whole and damaged; the loader with loads that fail, hang or work, on a clock
that only the loader's own waiting moves.
"""

import json
import shutil
import sys
import threading

import numpy as np
import pytest

from common.errors import PageLoadError
from device.coreml.convert.bundle_check import check_bundle, default_prompt, stats_line
from device.coreml.convert.bundle_loading import POSTPONED_MAX, POSTPONED_S, PartLoader
from device.coreml.convert.conversation import Conversation
from device.coreml.frozen.load_policy import DeviceFacts, LoadLimits
from tests.device.coreml.convert.conftest import N_VOCAB

GIB = 1 << 30
WELL = DeviceFacts(100 * GIB, 100 * GIB)


def test_the_published_form():
    assert stats_line(19.9, 0.6601, 13, 53) == "19.9 t/s, TTFT: 660.1ms (19.7 t/s, 13 tokens), 53 tokens"


def test_a_bundle_is_checked(make_bundle):
    folder, said = make_bundle(64), []
    prompt = default_prompt(N_VOCAB)
    assert len(set(prompt)) == 13 and prompt.max() < N_VOCAB
    found = check_bundle(folder, said.append, prompt, 3)
    assert json.loads(json.dumps(found)) == found and said
    assert found["wrong_files"] == [] and not any(each["level"] == "error" for each in found["findings"])
    talk = Conversation(folder)
    expected = talk.logits(talk.read(prompt)[-1][-1:])[0].argmax()
    assert found["interpreter"]["tokens"][0] == expected
    assert found["interpreter"]["stats"].endswith("13 tokens), 3 tokens")
    if sys.platform != "darwin":
        assert found["core_ml"]["available"] is False and "tokens" in found["core_ml"]["not_run"]


def test_a_damaged_bundle_is_not_run(make_bundle, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(make_bundle(64), folder)
    weights = next(folder.glob("*head*/Data/*/weights/weight.bin"))
    weights.write_bytes(b"")
    found = check_bundle(folder, print, np.array([2], np.int32), 1)
    assert "has 0 bytes" in found["wrong_files"][0]
    assert found["interpreter"]["available"] is False


class Scripted:
    """Loads that end as told, on a clock that only waiting moves."""

    def __init__(self, *endings, facts=(WELL,), limits=None):
        self.endings, self.facts, self.now_s, self.waits = list(endings), list(facts), 0.0, []
        self.loader = PartLoader(self._facts, lambda text: None, limits, lambda: self.now_s, self._sleep)

    def _facts(self, path):
        return self.facts.pop(0) if len(self.facts) > 1 else self.facts[0]

    def _sleep(self, seconds):
        self.waits.append(seconds)
        self.now_s += seconds

    def make(self):
        ending = self.endings.pop(0)
        if isinstance(ending, Exception):
            raise ending
        return ending

    def load(self, path):
        return self.loader.load("chunk infer", path, self.make)


def test_a_failed_compilation_is_tried_once_more_after_the_pause(tmp_path):
    device = Scripted(PageLoadError("ANECCompile FAILED (11)", cause="compile"), "model")
    assert device.load(tmp_path) == "model"
    assert device.waits == [LoadLimits().pause_s]
    assert [each["failed"] for each in device.loader.report()] == ["compile", None]


def test_the_first_error_is_the_one_that_is_told(tmp_path):
    misleading = PageLoadError(".functionName must be nil", cause="other")
    device = Scripted(PageLoadError("ANECCompile FAILED (11)", cause="compile"), misleading)
    with pytest.raises(PageLoadError, match="ANECCompile") as caught:
        device.load(tmp_path)
    assert caught.value.cause == "compile"


def test_a_full_disk_is_no_reason_to_try_again(tmp_path):
    device = Scripted(PageLoadError("no space left", cause="disk"))
    with pytest.raises(PageLoadError, match="no space"):
        device.load(tmp_path)
    assert device.waits == []


def test_a_hot_device_is_waited_for_and_not_for_ever(tmp_path):
    hot = DeviceFacts(100 * GIB, 100 * GIB, 2)
    device = Scripted("model", facts=(hot, hot, WELL))
    assert device.load(tmp_path) == "model" and device.waits == [POSTPONED_S] * 2
    device = Scripted("model", facts=(hot,))
    with pytest.raises(PageLoadError, match="thermal"):
        device.load(tmp_path)
    assert len(device.waits) == POSTPONED_MAX and device.loader.report() == []


def test_nothing_is_loaded_after_a_load_that_hangs(tmp_path):
    device, ended = Scripted("model", limits=LoadLimits(deadline_s=0.05)), threading.Event()
    try:
        with pytest.raises(PageLoadError, match="no answer") as caught:
            device.loader.load("chunk infer", tmp_path, ended.wait)
        assert caught.value.cause == "hang"
        with pytest.raises(PageLoadError, match="still hangs"):
            device.load(tmp_path)
    finally:
        ended.set()
