"""Aim: a worker's reports become series that only grow by what happened, also over the worker's restarts.
Method: reports by hand; the registry is read back as a scraper would."""

import asyncio
import json

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import RemoteProtocolError
from common.limits import FROZEN_ASK_BUCKETS_S
from common.metrics import FROZEN_CAUSES, FROZEN_STATES, Metrics
from common.wire.frozen import FrozenReport
from device.coreml.frozen.load_policy import Cause
from device.coreml.frozen.plan import PageState
from services.bridge.control import ControlClient
from services.bridge.frozen_metrics import FrozenMetrics

N = len(FROZEN_ASK_BUCKETS_S) + 1


def report(keys=0, builds=0, asks=0, ready=0, **more):
    counts = (asks, *(0,) * (N - 1))
    return FrozenReport(
        engine=more.pop("engine", "coreml"), pages={"ready": ready}, keys=keys, builds=builds,
        build_s=builds * 0.5, asks=counts, asks_s=asks * 0.001, **more,
    )  # fmt: skip


@pytest.fixture
def bridge():
    """(taker, value(name, **labels))"""
    metrics = Metrics("bridge")

    def value(name, **labels):
        text = generate_latest(metrics.registry).decode()
        return next(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"outrigger_{name}" and sample.labels == labels
        )

    return FrozenMetrics(metrics), value


def test_the_labels_are_the_workers_words():
    assert tuple(PageState) == FROZEN_STATES and tuple(Cause) == FROZEN_CAUSES


def test_counts_grow_by_differences_and_go_on_after_a_restart(bridge):
    frozen, value = bridge
    frozen.take(report(keys=100, builds=2, asks=4, ready=2))
    frozen.take(report(keys=150, builds=3, asks=6, ready=3))
    assert value("frozen_keys_total") == 150 and value("frozen_builds_total") == 3
    assert value("frozen_build_seconds_total") == 1.5 and value("frozen_pages", state="ready") == 3
    frozen.take(report(keys=20, builds=1, asks=1, ready=1))
    assert value("frozen_keys_total") == 170 and value("frozen_builds_total") == 4
    assert value("frozen_page_seconds_count", engine="coreml") == 7
    assert value("frozen_page_seconds_sum", engine="coreml") == pytest.approx(0.007)
    frozen.take(report(keys=30, engine="interpreter", asks=5))
    assert value("frozen_keys_total") == 200 and value("frozen_page_seconds_count", engine="interpreter") == 5


def test_causes_nobody_foresaw_count_as_other_and_all_go_with_the_worker(bridge):
    frozen, value = bridge
    frozen.take(report(failed={"hang": 2, "other": 1, "gremlins": 4}, ready=1))
    assert value("frozen_failed_pages", cause="hang") == 2
    assert value("frozen_failed_pages", cause="other") == 5
    frozen.gone()
    assert value("frozen_failed_pages", cause="hang") == 0 == value("frozen_pages", state="ready")


def test_reports_that_cannot_be_are_refused():
    good = msgspec.to_builtins(report(keys=1))
    assert msgspec.convert(good, FrozenReport) == report(keys=1)
    for wrong in ({"keys": -1}, {"asks": [-1]}, {"pages": {"ready": -1}}, {"build_s": -0.5}, {"more": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**good, **wrong}, FrozenReport)


def answered(line: dict):
    """What the bridge makes of a worker's answer to mem."""

    async def exchange():
        async def worker(reader, writer):
            await reader.readline()
            writer.write(json.dumps(line).encode() + b"\n")
            writer.close()

        async with await asyncio.start_server(worker, "127.0.0.1", 0) as server:
            client = ControlClient()
            await client.aim(*server.sockets[0].getsockname())
            try:
                return await client.report()
            finally:
                await client.close()

    return asyncio.run(exchange())


def test_the_control_channel_carries_it():
    line = {"thermal": 0, "avail_mb": 5, "state": "ready"}
    assert answered(line).frozen is None
    told = report(keys=7, page_ms=((3, 0, 1.85),))
    assert answered({**line, "frozen": msgspec.to_builtins(told)}).frozen == told
    with pytest.raises(RemoteProtocolError, match="lacks or breaks"):
        answered({**line, "frozen": {"engine": "coreml", "pages": "many"}})
