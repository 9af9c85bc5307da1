"""Aim: `outrigger top` makes right rates of two looks, and says so when nobody answers.

Method: real registries, served as the processes serve them, read back over HTTP.
"""

from __future__ import annotations

from click.testing import CliRunner

from common.metrics import Metrics
from services.cli.top import command, look, table
from services.runtime.exposition import Exposition


def lines(text: str) -> dict[str, str]:
    return {line[:17].strip(): line[17:] for line in text.splitlines()}


def test_rates_of_two_looks():
    mac = Metrics("mac")
    with Exposition(mac, 0) as served:
        ports = {"mac": int(served.url.split(":")[2].split("/")[0])}
        mac.add("prefill_tokens_total", 5000, side="host")
        before = look(ports)
        mac.add("prefill_tokens_total", 600, side="host")
        mac.add("prefill_seconds_total", 3, side="host")
        mac.add("generation_tokens_total", 10)
        mac.add("decode_seconds_total", 0.5)
        mac.set_state("worker_state", "state", "resting")
        mac.set("requests_running", 2)
        shown = lines(table(before, look(ports), 2.0))
    assert shown["prefill host"] == "200.0 tok/s" and shown["prefill worker"] == "-"
    assert shown["decode"] == "20.0 tok/s"
    assert shown["requests"].startswith("2 running, 0 waiting") and shown["worker"].startswith(
        "resting, heat -"
    )


def test_old_pages_are_shown_once_some_are_kept():
    mac, broker, bridge = Metrics("mac"), Metrics("broker"), Metrics("bridge")
    with Exposition(mac, 0) as one, Exposition(broker, 0) as two, Exposition(bridge, 0) as three:
        ports = {
            str(n): int(each.url.split(":")[2].split("/")[0]) for n, each in enumerate((one, two, three))
        }
        before = look(ports)
        assert "journal" not in lines(table(before, before, 1.0))
        broker.set("journal_bytes", 1.5e6)
        broker.set("held_tokens", 2048, where="journal")
        broker.set("held_tokens", 1024, where="worker")
        bridge.observe("held_query_seconds", 0.25)
        mac.add("held_groups_total", 3, where="worker")
        mac.add("held_groups_total", 1, where="journal")
        mac.add("pages_fallback_total", cause="deadline")
        shown = lines(table(before, look(ports), 2.0))
    assert shown["old pages"] == "2,048 tokens kept, 0 of them out of memory, 1,024 on the worker"
    assert shown["journal"] == "1.5 MB, 0 pages wait, oldest 0.0 s, 0 failed"
    assert shown["page query"] == "250.0 ms (mean)" and shown["by the worker"] == "75.0 % of groups"
    assert shown["page program"] == "-" and shown["page faults"].startswith("1 fallbacks, 0 damaged")


def test_counts_of_several_bridges_are_added_and_states_are_the_first_ones():
    bridges = Metrics("bridge"), Metrics("bridge")
    with Exposition(bridges[0], 0) as one, Exposition(bridges[1], 0) as two:
        ports = {str(n): int(each.url.split(":")[2].split("/")[0]) for n, each in enumerate((one, two))}
        bridges[0].set("worker_thermal_state", 1)
        for bridge, seconds in zip(bridges, (0.25, 0.5), strict=True):
            bridge.observe("held_query_seconds", seconds)
        looked = look(ports)
    assert looked["outrigger_held_query_seconds_count"] == 2
    assert looked["outrigger_held_query_seconds_sum"] == 0.75
    assert looked["outrigger_worker_thermal_state"] == 1


def test_nobody_there(monkeypatch, tmp_path):
    for name in ("GATEWAY", "MAC", "BROKER", "BRIDGE"):
        monkeypatch.setenv(f"OUTRIGGER_{name}_METRICS_PORT", "0")
    monkeypatch.setenv("OUTRIGGER_CONFIG", "")
    done = CliRunner().invoke(command)
    assert done.exit_code == 3 and "no process answers" in done.output
