"""The files that make Outrigger a service: a property list, a unit, and what the command says and writes.

Method: the list is read back by plistlib, the unit checked by systemd-analyze where there is one; the command in a home
directory of its own.
"""

from __future__ import annotations

import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from services.cli.service import command, service_of
from services.launch.service.launchd import plist
from services.launch.service.plan import plan
from services.launch.service.systemd import unit

ENVIRON = {"OUTRIGGER_RUN_DIR": "/tmp/a b%c", "OUTRIGGER_MODEL": 'quo"te$.gguf'}


def test_the_property_list_says_what_to_run_and_how_long_a_stop_may_take() -> None:
    said = plistlib.loads(plist(("/x/python", "-m", "a"), Path("/x"), ENVIRON, Path("/x/log"), 25.2))
    assert said["ProgramArguments"] == ["/x/python", "-m", "a"]
    assert said["EnvironmentVariables"] == ENVIRON
    assert said["ExitTimeOut"] == 25
    assert said["KeepAlive"] == {"SuccessfulExit": False}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "outrigger.service"
    path.write_text(unit((sys.executable, "-m", "services.cli.main", "run"), tmp_path, ENVIRON, 25.2))
    text = path.read_text()
    assert "TimeoutStopSec=25" in text and "KillMode=mixed" in text
    assert 'Environment="OUTRIGGER_RUN_DIR=/tmp/a b%%c"' in text
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not here (a Mac, or a Linux without systemd)")
    done = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "outrigger.service" in line]
    assert done.returncode == 0 and not ours, done.stderr


@pytest.mark.parametrize("kind", ["launchd", "systemd"])
def test_a_dry_run_writes_nothing_and_an_installation_the_same_once(
    kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OUTRIGGER_API_KEY", "s3cret")
    monkeypatch.setenv("OUTRIGGER_N_CTX", "4096")
    monkeypatch.setenv("OUTRIGGER_JOURNAL_DIR", "kept")
    monkeypatch.chdir(tmp_path)
    arguments = ["install", "--kind", kind]
    shown = CliRunner().invoke(command, [*arguments, "--dry-run"])
    assert shown.exit_code == 0, shown.output
    assert list(tmp_path.iterdir()) == []
    assert "OUTRIGGER_N_CTX" in shown.output and "s3cret" not in shown.output
    assert str(tmp_path / "kept") in shown.output, "the service starts in another folder"
    assert CliRunner().invoke(command, arguments).exit_code == 0
    (written,) = plan(kind, service_of(), tmp_path).files  # type: ignore[arg-type]
    assert written.read_text() in shown.output
    assert CliRunner().invoke(command, arguments).exit_code == 0
    written.write_text("somebody's own")
    refused = CliRunner().invoke(command, arguments)
    assert refused.exit_code != 0 and written.read_text() == "somebody's own"


def test_the_command_of_the_service_is_one_that_runs(tmp_path: Path) -> None:
    service = service_of()
    done = subprocess.run(
        [*service.command, "--help"], cwd=service.folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "Serve a model" in done.stdout, shlex.join(service.command)
