"""Aim: a program in another language asks over ZeroMQ with nothing but docs/zeromq.md: its Node example, as it stands.

Method: the code block is cut out of the document and run by node against a running system, with the npm packages that
`make test-system` put into .outrigger/node.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.journey.system import running_system
from tests.journey.test_zeromq import ANSWER_S, blocks

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def system(smollm2):
    with running_system("--model", str(smollm2), "--n-ctx", "2048", "--no-worker") as system:
        yield system


@pytest.fixture(scope="module")
def program(checkout: Path) -> Path:
    """The example in a file beside the packages; not to find them is a failure, not a skip."""
    folder = checkout / ".outrigger" / "node"
    if not shutil.which("node") or not (folder / "node_modules" / "zeromq").is_dir():
        pytest.fail("node or its packages are missing: run `make test-system`", pytrace=False)
    path = folder / "client.js"
    path.write_text(blocks(checkout, "js")[0])
    return path


def test_the_node_client_as_it_stands(system, program):
    done = subprocess.run(
        ["node", str(program), f"ipc://{system.run_dir}/public.sock"],
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and re.search(r"^(stop|length), \d+ tokens$", done.stderr, re.M)


def test_a_node_client_killed_in_the_middle_leaves_the_host_to_others(system, program):
    longer = program.with_name("longer.js")
    longer.write_text(
        program.read_text().replace("max_tokens: 32", "max_tokens: 1500, logit_bias: { 0: -100, 2: -100 }")
    )
    endpoint = f"ipc://{system.run_dir}/public.sock"
    with subprocess.Popen(["node", str(longer), endpoint], stdout=subprocess.PIPE) as victim:
        assert os.read(victim.stdout.fileno(), 1)
        victim.send_signal(signal.SIGKILL)
    done = subprocess.run(["node", str(program), endpoint], capture_output=True, text=True, timeout=ANSWER_S)
    assert done.returncode == 0 and done.stdout.strip()
