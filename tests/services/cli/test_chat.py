"""Aim: `outrigger chat` streams an answer, remembers the talk, and a Ctrl-C stops the answer and not the program.

Method: the command as a process against the gateway's rig, whose host plays the model; input and output are pipes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from common.wire import messages as m
from tests.services.cli.test_main import CLEAN, ROOT
from tests.services.gateway.rig import Rig

pytestmark = pytest.mark.model


@pytest.fixture
def rig(smollm2):
    with Rig(smollm2) as rig:
        yield rig


@pytest.fixture
def chat(rig):
    environ = CLEAN | {"PYTHONPATH": str(ROOT), "OUTRIGGER_RUN_DIR": str(rig.run_dir), "OUTRIGGER_CONFIG": ""}
    process = subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "services.cli.main",
            "chat",
            "--system",
            "Be brief.",
            "--max-tokens",
            "50",
        ],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


def read_until(chat: subprocess.Popen[str], words: str) -> str:
    """What it prints, up to `words`."""
    said = ""
    while not said.endswith(words):
        byte = os.read(chat.stdout.fileno(), 1)
        assert byte, f"it ended: {said!r}"
        said += byte.decode()
    return said


def test_a_talk_in_three_turns(rig, chat):
    prompts = []

    async def answer(host, ask, ids, peer):
        prompts.append(b"".join(rig.prompts.vocabulary.spelling(int(i)) for i in ids).decode())
        if len(prompts) == 2:
            await host.send(
                m.TokenReady(ask.request_id, 0, rig.prompts.vocabulary.tokenize("slowly")[0]), peer
            )
            return  # and nothing more: it has to be stopped
        await host.write(ask, peer, rig.prompts.vocabulary.tokenize("Hello you."))

    rig.host.behave = answer
    assert rig.prompts.model_name in read_until(chat, "leaves.\n")
    read_until(chat, "> ")
    chat.stdin.write("first question\n")
    read_until(chat, "Hello you.\n> ")
    chat.stdin.write("second question\n")
    read_until(chat, "slow")
    chat.send_signal(signal.SIGINT)
    read_until(chat, "(stopped)\n> ")
    rig.until(lambda: any(isinstance(told, m.Cancel) for told in rig.host.told))
    chat.stdin.write("third question\n")
    read_until(chat, "Hello you.\n> ")
    assert "Be brief." in prompts[0]
    assert all(words in prompts[2] for words in ("first question", "Hello you.", "second question", "slow"))
    chat.stdin.write("/new\nfourth question\n")
    read_until(chat, "Hello you.\n> ")
    assert "first question" not in prompts[3] and "Be brief." in prompts[3]
    chat.stdin.close()
    assert chat.wait(20) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "nothing runs (run directory "),
        (("--endpoint", "ipc://{folder}/public.sock"), "does the gateway run?"),
    ],
)
def test_without_a_gateway_it_says_so(tmp_path, more, said):
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "chat", *(each.format(folder=tmp_path) for each in more)],
        env=CLEAN | {"PYTHONPATH": str(ROOT), "OUTRIGGER_RUN_DIR": str(tmp_path), "OUTRIGGER_CONFIG": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3 and said in done.stderr
