"""Aim: each series is declared once, named by the rules, there from the start, and grows only within its labels.

Method: the declarations are walked; the exposition text of each process is read back by Prometheus' own parser.
"""

from __future__ import annotations

import re

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.limits import FROZEN_ASK_BUCKETS_S
from common.metrics import PREFIX, PROCESSES, SERIES, Metrics
from common.wire import routes
from services.runtime import conversation


def samples(metrics: Metrics) -> dict[tuple[str, frozenset], float]:
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_names_follow_the_rules(series):
    assert re.fullmatch(r"[a-z][a-z0-9_]+[a-z0-9]", series.name)
    assert series.name.endswith("_total") == (series.kind == "counter")
    assert bool(series.buckets) == (series.kind == "histogram")
    assert list(series.buckets) == sorted(series.buckets)
    assert set(series.owners) <= set(PROCESSES)
    assert series.text.endswith(".")
    if "seconds" in series.text.lower() or "Time" in series.text:
        assert "seconds" in series.name
    combinations = 1
    for values in series.labels.values():
        combinations *= len(values)
    assert combinations <= 50, "labels stay bounded"


@pytest.mark.parametrize("process", PROCESSES)
def test_every_owned_series_shows_its_zero_from_the_start(process):
    shown = samples(Metrics(process))
    assert set(shown.values()) == {0.0}
    for series in SERIES:
        name = PREFIX + series.name + ("_count" if series.kind == "histogram" else "")
        found = [labels for sample, labels in shown if sample == name]
        combinations = 1
        for values in series.labels.values():
            combinations *= len(values)
        assert len(found) == (combinations if process in series.owners else 0)


def test_values_arrive_where_they_were_put():
    metrics = Metrics("mac")
    metrics.add("prompt_tokens_total", 300, source="worker")
    metrics.observe("stage_seconds", 0.25, side="host", phase="head")
    metrics.set("split_layer", 18)
    metrics.set_state("worker_state", "state", "ready")
    shown = samples(metrics)
    assert shown["outrigger_prompt_tokens_total", frozenset({("source", "worker")})] == 300
    assert shown["outrigger_stage_seconds_sum", frozenset({("side", "host"), ("phase", "head")})] == 0.25
    assert shown["outrigger_split_layer", frozenset()] == 18
    states = {
        dict(labels)["state"]: value
        for (name, labels), value in shown.items()
        if name == "outrigger_worker_state"
    }
    assert [state for state, value in states.items() if value == 1] == ["ready"]
    assert sum(states.values()) == 1


def test_what_another_process_counted_becomes_a_histogram():
    metrics = Metrics("bridge")
    n = len(FROZEN_ASK_BUCKETS_S)
    metrics.observe_counted("frozen_page_seconds", [2, 1] + [0] * (n - 2) + [1], 3.5, engine="coreml")
    metrics.observe_counted("frozen_page_seconds", [0, 1] + [0] * (n - 1), 0.5, engine="coreml")
    shown, engine = samples(metrics), ("engine", "coreml")
    assert shown["outrigger_frozen_page_seconds_sum", frozenset({engine})] == 4.0
    assert shown["outrigger_frozen_page_seconds_count", frozenset({engine})] == 5
    bucket = "outrigger_frozen_page_seconds_bucket"
    found = [shown[bucket, frozenset({engine, ("le", le)})] for le in ("0.0005", "0.001", "1.024", "+Inf")]
    assert found == [2, 4, 4, 5]
    for wrong in ({"engine": "coreml", "x": ""}, {}):
        with pytest.raises(LookupError):
            metrics.observe_counted("frozen_page_seconds", [0] * (n + 1), 0.0, **wrong)
    with pytest.raises(LookupError):
        Metrics("mac").observe_counted("frozen_page_seconds", [0] * (n + 1), 0.0, engine="coreml")


def test_two_processes_in_one_interpreter_do_not_meet():
    one, other = Metrics("mac"), Metrics("mac")
    one.add("generation_tokens_total")
    assert samples(other)["outrigger_generation_tokens_total", frozenset()] == 0


def test_an_unforeseen_cause_counts_as_other():
    metrics = Metrics("mac")
    metrics.add("worker_fallback_total", cause="something nobody thought of")
    assert samples(metrics)["outrigger_worker_fallback_total", frozenset({("cause", "other")})] == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda metrics: metrics.add("no_such_series_total"),
        lambda metrics: metrics.add("requests_total", outcome="stop"),
        lambda metrics: metrics.set("generation_tokens_total", 3),
        lambda metrics: metrics.add("prompt_tokens_total"),
        lambda metrics: metrics.add("prompt_tokens_total", source="moon"),
    ],
    ids=["undeclared", "not owned", "wrong kind", "labels missing", "label value unknown"],
)
def test_a_misuse_is_an_error(use):
    with pytest.raises(LookupError):
        use(Metrics("mac"))


def test_the_bus_labels_are_those_of_the_bus():
    labels = next(series for series in SERIES if series.name == "bus_dropped_total").labels
    assert labels["route"] == tuple(routes.ROUTES)
    assert labels["reason"] == conversation.DROP_REASONS
