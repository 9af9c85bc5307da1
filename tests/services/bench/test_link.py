"""Aim: the link's bench measures the cable's own code against a real worker and says so in the agreed figures.

Method: the quick form, whole, on this machine; its figures are read, never judged.
"""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

from click.testing import CliRunner

from services.bench.link import command
from services.bench.raw_tcp import RawClient, serve


def test_the_quick_form_tells_all_figures_and_keeps_its_rows(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--quick", "--json", "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["bench"] == "link"
    assert set(told["figures"]) == {
        "rtt_us_p50", "rtt_us_p90", "rtt_us_p99", "raw_tcp_us_p50", "bandwidth_vs_raw_tcp", "bandwidth_mb_s",
        "raw_tcp_mb_s", "hash_cost_share",
    }  # fmt: skip
    assert told["figures"]["rtt_us_p50"] <= told["figures"]["rtt_us_p90"] <= told["figures"]["rtt_us_p99"]
    rows = [json.loads(line) for line in (tmp_path / "link.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert all(len(row["rtt_us"]) == len(row["raw_rtt_us"]) == 150 for row in rows)


def test_the_yardstick_takes_messages_of_any_length_and_ends_with_its_client() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = threading.Thread(target=serve, args=(port,))
    server.start()
    for _ in range(500):
        try:
            client = RawClient(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
    for n_bytes in (8, 100_000, 3_000_000, 0):
        client.send(memoryview(bytes(n_bytes)))
        client.take()
    client.close()
    server.join(10)
    assert not server.is_alive()
