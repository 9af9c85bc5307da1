"""Aim: the command teaches, starts at once, and says what is wrong in one line with the right exit code.

Method: `outrigger` as a process, with good and bad flags, settings and files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
PORTS = ("ZMQ", "ZMQ_EVENTS", "LISTEN", "LISTEN_CONTROL", "GATEWAY_METRICS", "MAC_METRICS", "BRIDGE_METRICS")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIGGER_")}


def outrigger(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        env=CLEAN | {"PYTHONPATH": str(ROOT)} | environ,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys; from services.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(set(sys.modules) & {'numpy', 'zmq', 'llama_cpp', 'aiohttp', 'structlog', 'supervisor'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    done = outrigger(name, "--help")
    assert done.returncode == 0
    assert "Usage: outrigger" in done.stdout


def test_versions_of_everything_that_matters():
    done = outrigger("--version")
    rows = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0
    for name in (
        "outrigger",
        "python",
        "bus protocol",
        "cable protocol",
        "llama-cpp-python",
        "ggml",
        "pyzmq",
    ):
        assert rows[name].strip() and "cannot" not in rows[name], name
    assert outrigger("version").stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "said"),
    [
        (
            ["run", "--n-ctx", "1000"],
            {},
            2,
            "outrigger: host.n_ctx = 1000 (flag --n-ctx): it must be an integer from 512",
        ),
        (["run", "--port", "99999"], {}, 2, "gateway.http_port = 99999 (flag --port): it must be an integer"),
        (["run", "--kv-host-tokens", "1"], {}, 2, "host.kv_host_tokens = 1 (flag --kv-host-tokens): it must"),
        (["worker", "--port", "99999"], {}, 2, "worker.port = 99999 (flag --port): it must be an integer"),
        (["run"], {"OUTRIGGER_HTTP_PORTS": "1"}, 2, "did you mean OUTRIGGER_HTTP_PORT?"),
        (["run"], {"OUTRIGGER_CONFIG": "absent.toml"}, 2, "OUTRIGGER_CONFIG: there is no file absent.toml"),
        (["config", "check"], {"OUTRIGGER_SPLIT": "maybe"}, 2, "it must be one of off, on"),
        (["rnu"], {}, 2, "No such command 'rnu'"),
    ],
)
def test_a_bad_setting_is_one_sentence_and_code_2(arguments, environ, code, said):
    done = outrigger(*arguments, **environ)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_one_sentence(tmp_path):
    done = outrigger(
        "run", "--model", str(tmp_path / "absent.gguf"), "--port", "0", OUTRIGGER_DATA_DIR=str(tmp_path)
    )
    assert done.returncode == 1
    assert done.stderr.startswith("outrigger: there is no model file")
    assert len(done.stderr.splitlines()) == 1


def test_what_the_disk_refuses_is_one_sentence(tmp_path, smollm2):
    (tmp_path / "tails").write_text("a file where a folder is needed")
    done = outrigger(
        *("run", "--model", str(smollm2), "--port", "0"),
        OUTRIGGER_DATA_DIR=str(tmp_path),
        OUTRIGGER_RUN_DIR=str(tmp_path / "run"),
        **{f"OUTRIGGER_{name}_PORT": "0" for name in PORTS},
    )
    assert done.returncode == 1
    assert done.stderr == f"outrigger: cannot read or write {tmp_path / 'tails'}: file exists\n"


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_debug_keeps_the_trace(how):
    flags, environ = (["--debug"], {}) if how == "flag" else ([], {"OUTRIGGER_DEBUG": "1"})
    done = outrigger(*flags, "config", "check", OUTRIGGER_SPLIT="maybe", **environ)
    assert "Traceback" in done.stderr
    assert "SettingError" in done.stderr


def test_settings_are_shown_with_their_source_and_secrets_hidden(tmp_path):
    (tmp_path / "outrigger.toml").write_text("[host]\nn_ctx = 1024\n")
    done = outrigger("config", "show", cwd=tmp_path, OUTRIGGER_API_KEY="a-secret", OUTRIGGER_HTTP_PORT="9000")
    assert done.returncode == 0
    assert "n_ctx = 1024\n" in done.stdout
    assert "OUTRIGGER_N_CTX; from: " in done.stdout
    assert "from: environment variable OUTRIGGER_HTTP_PORT" in done.stdout
    assert "a-secret" not in done.stdout
    assert 'api_key = "(set)"' in done.stdout
    assert "from: worked out" in done.stdout
    assert "settings are good" in outrigger("config", "check", cwd=tmp_path).stdout


def test_one_setting_by_any_of_its_names_and_as_json(tmp_path):
    shown = [
        outrigger("config", "show", name, cwd=tmp_path, OUTRIGGER_N_CTX="1024").stdout
        for name in ("host.n_ctx", "n_ctx", "OUTRIGGER_N_CTX")
    ]
    assert len(set(shown)) == 1
    assert "n_ctx = 1024\n" in shown[0] and "default: 8192" in shown[0]
    (told,) = json.loads(outrigger("config", "show", "host.n_ctx", "--json", cwd=tmp_path).stdout)
    assert (told["key"], told["value"], told["source"]) == ("host.n_ctx", 8192, "default")
    assert told["allowed"].startswith("an integer from 512") and told["effect"]
    unknown = outrigger("config", "show", "n_ctxx", cwd=tmp_path)
    assert (unknown.returncode, "no setting or section 'n_ctxx'" in unknown.stderr) == (2, True)
