"""Aim: the series grow by what happened, and by nothing else.
Method: a real registry is read back after reports and states as the mac process makes them."""

from __future__ import annotations

from common.wire import messages as m
from common.wire.messages import HostStatus, ReadReport, UbatchTimes, WorkerView
from services.mac.desk import phase_of
from services.mac.tally import Tally


def value(tally, name, **labels):
    return tally.metrics.registry.get_sample_value(f"outrigger_{name}", labels)


def test_a_split_read_counts_on_both_sides():
    tally = Tally()
    stages = (
        UbatchTimes(256, 256, 0.0, head_s=1.0, worker_s=0.5, round_trip_s=0.6, import_s=0.01),
        UbatchTimes(512, 100, 1.0, head_s=0.5, tail_s=0.25),
    )
    tally.read_done(
        ReadReport(
            tokens_cache=256, tokens_host=100, tokens_worker=256, prefill_s=2.0, wait_s=0.125, stages=stages
        )
    )
    tokens = [value(tally, "prompt_tokens_total", source=source) for source in ("cache", "host", "worker")]
    assert tokens == [256, 100, 256]
    assert value(tally, "prefill_seconds_total", side="host") == 1.75
    assert value(tally, "prefill_seconds_total", side="worker") == 0.5
    assert value(tally, "prefill_seconds_total", side="together") == 2.0
    sides = [value(tally, "prefill_tokens_total", side=side) for side in ("host", "worker", "together")]
    assert sides == [356, 256, 356]
    assert value(tally, "bubble_seconds_total") == 0.125
    assert value(tally, "stage_seconds_count", side="host", phase="head") == 2
    assert value(tally, "stage_seconds_count", side="worker", phase="tail") == 1
    assert value(tally, "worker_bypass_total", reason="small") == 0


def test_bypasses_and_fallbacks_count_by_reason():
    tally = Tally()
    tally.read_done(ReadReport(tokens_host=10, bypass_reason="small"))
    tally.fell_back("deadline")
    tally.fell_back("a cause nobody declared")
    tally.fell_back("nonfinite")
    tally.pages_fell_back("nonfinite")
    assert value(tally, "worker_bypass_total", reason="small") == 1
    assert value(tally, "worker_fallback_total", cause="deadline") == 1
    assert value(tally, "worker_fallback_total", cause="other") == 1
    assert value(tally, "merge_nonfinite_total") == 2


def test_tokens_and_states():
    tally = Tally()
    tally.token_sent(0.25)
    tally.token_sent(0.5)
    tally.stands(HostStatus("ready", "m", 512, 512, 1, 3, WorkerView("resting", "", 20), 5))
    assert value(tally, "generation_tokens_total") == 2 and value(tally, "decode_seconds_total") == 0.75
    assert value(tally, "requests_waiting") == 3 and value(tally, "split_layer") == 20
    assert value(tally, "worker_state", state="resting") == 1
    assert value(tally, "worker_state", state="ready") == 0


def test_the_workers_screen_follows_the_request():
    report = ReadReport()
    shown = [
        phase_of(message)
        for message in (
            m.Queued("r", 0),
            m.PrefillAdvanced("r", 256, 700),
            m.TokenReady("r", 0, 5),
            m.TokenReady("r", 1, 5),
            m.Finished("r", "stop", 700, 2, report),
        )
    ]
    assert [phase and (phase.phase, phase.n1, phase.n2) for phase in shown] == [
        None,
        ("reading", 256, 700),
        ("writing", 0, 0),
        None,
        ("ready", 0, 0),
    ]


def test_seconds_of_attention_by_pages_count_by_rows():
    tally = Tally()
    tally.attended_by_pages(1, 0.25)
    tally.attended_by_pages(256, 2.0)
    tally.attended_by_pages(2, 1.0)
    tally.waited_for_pages(256, 0.5, 1.5)
    for part, one, many in (("all", 0.25, 3.0), ("wait", 0, 0.5), ("worker", 0, 1.5)):
        by_rows = [value(tally, "page_attention_seconds_total", part=part, rows=r) for r in ("one", "many")]
        assert by_rows == [one, many], part
