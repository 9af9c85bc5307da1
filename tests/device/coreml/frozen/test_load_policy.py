"""Aim: the decision about one load, for every kind of failure and every state of the device.

Method: a table of histories and facts against the step expected; properties of the order of checks.
"""

import pytest

from device.coreml.frozen.load_policy import (
    MIB,
    Attempt,
    Cause,
    DeviceFacts,
    GiveUp,
    Load,
    LoadLimits,
    Postpone,
    WaitUntil,
    decide,
    judge,
)

LIMITS = LoadLimits()
PAGE = 67 * MIB
AMPLE = DeviceFacts(1 << 40, 1 << 40)


def failed(cause, text="first", at=100.0):
    return Attempt(cause, text, at, 1.0)


@pytest.mark.parametrize(
    ("attempts", "facts", "now_s", "step"),
    [
        ([], AMPLE, 0, Load()),
        ([], DeviceFacts(2000 * MIB, 1 << 40), 0, Cause.DISK),
        ([], DeviceFacts(1 << 40, 800 * MIB), 0, Cause.MEMORY),
        ([], DeviceFacts(1 << 40, 1 << 40, thermal=2), 0, Cause.THERMAL),
        ([], DeviceFacts(1 << 40, 1 << 40, thermal=1), 0, Load()),
        ([failed(Cause.COMPILE)], AMPLE, 101, WaitUntil(340.0, Cause.COMPILE)),
        ([failed(Cause.COMPILE)], AMPLE, 340, Load()),
        ([failed(Cause.OTHER)], AMPLE, 340, Load()),
        ([failed(Cause.COMPILE)], DeviceFacts(0, 1 << 40), 340, Cause.DISK),
        ([failed(Cause.COMPILE), failed(Cause.OTHER, "second")], AMPLE, 9e9, GiveUp(Cause.COMPILE, "first")),
        ([failed(Cause.HANG)], AMPLE, 9e9, GiveUp(Cause.HANG, "first")),
        ([failed(Cause.MEMORY)], AMPLE, 9e9, GiveUp(Cause.MEMORY, "first")),
        ([failed(Cause.PLACEMENT)], AMPLE, 9e9, GiveUp(Cause.PLACEMENT, "first")),
        ([failed(Cause.WRONG)], AMPLE, 9e9, GiveUp(Cause.WRONG, "first")),
        ([failed(Cause.SLOW)], AMPLE, 9e9, GiveUp(Cause.SLOW, "first")),
    ],
)
def test_step(attempts, facts, now_s, step):
    found = decide(attempts, facts, PAGE, LIMITS, now_s)
    if isinstance(step, Cause):
        assert isinstance(found, Postpone) and found.cause == step
    else:
        assert found == step


def test_postponements_say_the_numbers():
    step = decide([], DeviceFacts(100 * MIB, 1 << 40), PAGE, LIMITS, 0)
    assert step.text == "100 MiB of disk free, a load wants 2,115 MiB"


@pytest.mark.parametrize(
    ("placement", "wanted", "ask_s", "error", "cause"),
    [
        ("neural engine", "neural engine", 0.002, 0.001, None),
        ("cpu", "any", 0.002, 0.001, None),
        ("gpu", "neural engine", 0.002, 0.001, Cause.PLACEMENT),
        ("neural engine", "neural engine", 0.002, 0.5, Cause.WRONG),
        ("neural engine", "neural engine", 0.002, float("nan"), Cause.WRONG),
        ("neural engine", "neural engine", 1.0, 0.001, Cause.SLOW),
    ],
)
def test_judgement_of_a_loaded_page(placement, wanted, ask_s, error, cause):
    verdict = judge(placement, wanted, ask_s, error, LIMITS)
    assert (verdict and verdict[0]) == cause
