"""Aim: one command serves a model over two processes, what it says can be pasted, and a Ctrl-C leaves nothing behind.

Method: `outrigger run` as a person starts it, with the embedded model; its own curl line is run by a shell.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.journey.system import FREE_PORTS, START_S, WAIT_S

ANSWER_S = 60.0


class Run:
    """`outrigger run` with its output in a file."""

    def __init__(self, folder: Path, *flags: str, **environ: str) -> None:
        self.folder = folder
        self.out = folder / "said"
        settings = dict.fromkeys(FREE_PORTS, "0") | {
            "OUTRIGGER_RUN_DIR": str(folder / "run"),
            "OUTRIGGER_CONFIG": "",
            "OUTRIGGER_SPLIT_GUARD": "off",
        }
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.cli.main", "run", "--n-ctx", "2048", *flags],
                env=os.environ | settings | environ,
                stdout=out,
                stderr=out,
            )

    @property
    def said(self) -> str:
        return self.out.read_text()

    def wait_ready(self) -> str:
        """Base of the API."""
        give_up_at = time.monotonic() + START_S
        while (
            not (found := re.search(r"ready after [\d.]+ s: (\S+)/v1", self.said))
            or "Ctrl-C" not in self.said
        ):
            assert self.process.poll() is None and time.monotonic() < give_up_at, self.said
            time.sleep(0.05)
        return found[1]

    def pids(self) -> list[int]:
        """Processes of this run, this one aside: all that have its run directory in their environment."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.folder).encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
        return found

    def stop(self) -> int:
        """Ctrl-C; the exit code. What everybody logged is printed, for pytest to show when a test fails."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(WAIT_S)
        for log in sorted((self.folder / "run").glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        return code


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="outrigger-test-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.mark.model
def test_what_it_prints_can_be_pasted_and_the_worker_reads_along(folder, smollm2):
    run = Run(folder, "--model", str(smollm2))
    try:
        url = run.wait_ready()
        if shutil.which("curl"):
            pasted = run.said[run.said.index("curl ") : run.said.index("\n\nCtrl-C")]
            answer = json.loads(_paste(pasted))
            assert "choices" in answer, answer
            assert answer["choices"][0]["message"]["content"]
        _await_worker(url)
        answer = _ask(url, smollm2.stem, " ".join(f"{n} boats sailed." for n in range(110)))
        assert answer["usage"]["prompt_tokens"] > 600
        assert answer["outrigger"]["tokens_worker"] >= 512, answer["outrigger"]["bypass_reason"]
        assert len(run.pids()) == 7, "the command, the supervisor, gateway, mac, broker, bridge and worker"
    finally:
        code = run.stop()
    assert code == 0
    assert "stopping ..." in run.said.splitlines()
    assert run.pids() == []


@pytest.mark.model
def test_a_port_in_use_is_told_before_anything_starts(folder, smollm2):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Run(folder, "--model", str(smollm2), "--no-worker", "--port", str(port))
        assert run.process.wait(START_S) == 3
    assert f"outrigger: port {port} of 127.0.0.1, for the HTTP API, is not free" in run.said
    assert "--port PORT or OUTRIGGER_HTTP_PORT" in run.said


@pytest.mark.model
def test_without_a_worker_the_host_reads_alone(folder, smollm2):
    run = Run(folder, "--model", str(smollm2), "--no-worker", "--threads", "1")
    try:
        answer = _ask(run.wait_ready(), smollm2.stem, " ".join(f"{n} boats sailed." for n in range(20)))
        assert answer["outrigger"]["tokens_worker"] == 0
        assert answer["outrigger"]["bypass_reason"] == "off"
    finally:
        assert run.stop() == 0


def _await_worker(url: str) -> None:
    """Until the link is up: the host serves before that, and would read alone."""
    give_up_at = time.monotonic() + START_S
    while True:
        with urllib.request.urlopen(f"{url}/health", timeout=WAIT_S) as answer:
            state = json.load(answer)["worker"]["state"]
        if state == "ready":
            return
        assert time.monotonic() < give_up_at, state
        time.sleep(0.05)


def _paste(line: str) -> str:
    """What a shell prints for a line. When it takes too long the whole of it is ended: a curl left behind would keep
    its end of the pipe, and the test waiting for it."""
    shell = subprocess.Popen(
        ["sh", "-c", line],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=ANSWER_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        shell.stdout.close()
    assert shell.returncode == 0, said
    return said


def _ask(url: str, model: str, text: str) -> dict:
    """The answer to one message, with the report of where its tokens were read."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Outrigger-Report": "1"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return json.load(answer)
