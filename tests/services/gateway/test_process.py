"""The gateway process refuses to start where it should, in one line. Method: `python -m services.gateway` itself."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.model


@pytest.fixture
def run_dir():
    path = Path(tempfile.mkdtemp(prefix="outrigger-test-"))
    yield path
    shutil.rmtree(path)


def start(run_dir: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs the process to its end, which comes at once when it refuses."""
    ours = {"OUTRIGGER_RUN_DIR": str(run_dir), "OUTRIGGER_CONFIG": "", "OUTRIGGER_GATEWAY_METRICS_PORT": "0"}
    return subprocess.run(
        [sys.executable, "-m", "services.gateway"],
        env=os.environ | ours | settings,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_open_address_without_a_key_is_refused(run_dir):
    ended = start(run_dir, OUTRIGGER_HTTP_HOST="0.0.0.0", OUTRIGGER_HTTP_PORT="0")
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert "OUTRIGGER_HTTP_HOST = '0.0.0.0'" in last and "set OUTRIGGER_API_KEY" in last


def test_a_taken_port_is_named(run_dir, smollm2):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = start(run_dir, OUTRIGGER_HTTP_PORT=port, OUTRIGGER_MODEL=str(smollm2))
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr.splitlines()[-1]


def test_a_missing_model_is_named(run_dir, tmp_path):
    ended = start(run_dir, OUTRIGGER_MODEL=str(tmp_path / "absent.gguf"), OUTRIGGER_HTTP_PORT="0")
    assert ended.returncode == 1
    assert "cannot read the model file" in ended.stderr.splitlines()[-1]


def test_zeromq_beyond_this_machine_without_keys_is_refused(run_dir, smollm2):
    ended = start(
        run_dir, OUTRIGGER_MODEL=str(smollm2), OUTRIGGER_HTTP_PORT="0", OUTRIGGER_ZMQ_HOST="0.0.0.0"
    )
    assert ended.returncode == 2
    assert (
        "tcp://0.0.0.0:5570: an address other than loopback needs CURVE keys" in ended.stderr.splitlines()[-1]
    )


def test_a_taken_zeromq_port_is_named(run_dir, smollm2):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = start(run_dir, OUTRIGGER_MODEL=str(smollm2), OUTRIGGER_HTTP_PORT="0", OUTRIGGER_ZMQ_PORT=port)
    assert ended.returncode == 1
    assert f"cannot bind tcp://127.0.0.1:{port}" in ended.stderr.splitlines()[-1]
