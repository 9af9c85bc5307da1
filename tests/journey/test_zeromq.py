"""Aim: what docs/zeromq.md shows can be pasted: its Python programs run as they stand against a running system.

Method: the code blocks are cut out of the document, written to files and run by a Python that finds nothing of ours
(but for the block that uses our client). The Node program is run by tests/system.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journey.system import WAIT_S

pytestmark = pytest.mark.model

ANSWER_S = 60.0


def blocks(checkout: Path, language: str) -> list[str]:
    """The code blocks of the document in a language, in order."""
    text = (checkout / "docs" / "zeromq.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def alone(*arguments: str, **more: object) -> dict[str, object]:
    """How to run a program in a folder without any of our packages in reach."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("OUTRIGGER_", "PYTHON"))
    }
    return {"args": [sys.executable, *arguments], "env": environ, "text": True, **more}


def test_the_python_client_as_it_stands(system, checkout, tmp_path):
    program = tmp_path / "client.py"
    program.write_text(blocks(checkout, "python")[0])
    assert "services" not in program.read_text() and "common" not in program.read_text()
    runs = [
        subprocess.run(
            **alone(str(program), f"ipc://{system.run_dir}/public.sock", cwd=tmp_path),
            capture_output=True,
            timeout=ANSWER_S,
        )
        for _ in range(2)
    ]
    for done in runs:
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() and re.search(r"^(stop|length), \d+ tokens$", done.stderr, re.M)
    assert runs[0].stdout == runs[1].stdout, "greedy"


def test_events_of_a_request_as_they_stand(system, checkout, tmp_path):
    listener, asker = tmp_path / "events.py", tmp_path / "client.py"
    asker.write_text(blocks(checkout, "python")[0])
    listener.write_text(blocks(checkout, "python")[1])
    with subprocess.Popen(
        **alone(str(listener), f"ipc://{system.run_dir}/events.sock", cwd=tmp_path), stdout=subprocess.PIPE
    ) as listening:
        try:
            assert listening.stdout.readline().startswith("status ")
            done = subprocess.run(
                **alone(str(asker), f"ipc://{system.run_dir}/public.sock", cwd=tmp_path),
                capture_output=True,
                timeout=ANSWER_S,
            )
            assert done.returncode == 0
            topics = []
            while "request.ended" not in topics:
                topics.append(listening.stdout.readline().partition(" ")[0])
        finally:
            listening.kill()
            listening.wait(WAIT_S)
    assert {"request.started", "request.reading", "request.ended"} <= set(topics)


def test_our_client_as_it_stands(system, checkout):
    program = blocks(checkout, "py")[0].replace(
        "OutriggerClient()", f'OutriggerClient("ipc://{system.run_dir}/public.sock")'
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True, timeout=ANSWER_S
    )
    assert done.returncode == 0, done.stderr
    assert "completion_tokens" in done.stdout.splitlines()[-1]
