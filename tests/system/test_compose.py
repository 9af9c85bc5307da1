"""docker-compose.yml and the Dockerfile as far as they can be checked without a container runtime.

Method: `docker-compose config` (1.29, Debian's package) must accept the file, with and without the profile; its output
is read back and held against what docs/operations.md promises. No image is built.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import load_settings
from common.config.keys import KEYS

TOP = Path(__file__).resolve().parents[2]
SYSTEM = {"gateway", "mac", "broker", "bridge", "worker", "prometheus", "grafana"}
WATCHERS = {"prometheus-host", "grafana-host"}
PROCESSES = ("gateway", "mac", "broker", "bridge", "worker")

pytestmark = pytest.mark.system


def config(*arguments: str, **environ: str) -> dict[str, Any]:
    command = shutil.which("docker-compose")
    assert command, "docker-compose is missing; install it: apt-get install docker-compose"
    outside = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIGGER_")}
    done = subprocess.run(
        [command, "-f", str(TOP / "docker-compose.yml"), *arguments, "config"],
        env={**outside, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def test_the_whole_system_and_the_profile() -> None:
    whole = config("--profile", "monitoring")["services"]
    assert set(whole) == SYSTEM | WATCHERS
    assert {name for name in whole if whole[name].get("profiles") == ["monitoring"]} == WATCHERS


def test_one_network_namespace_and_little_that_is_published() -> None:
    services = config()["services"]
    for name in SYSTEM - {"gateway"}:
        assert services[name]["network_mode"] == "service:gateway"
        assert "ports" not in services[name]
    assert [str(port).split(":")[0] for port in services["gateway"]["ports"]] == ["127.0.0.1", "127.0.0.1"]


def test_every_container_is_confined_watched_and_limited() -> None:
    for name, service in config("--profile", "monitoring")["services"].items():
        assert service["read_only"] is True, name
        assert service["user"].split(":")[0] not in ("0", "root"), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"] and service["cpus"] and service["pids_limit"], name
        assert service["healthcheck"]["test"], name
        assert service["logging"]["options"]["max-size"], name


def test_settings_are_ones_that_there_are_and_each_process_loads_its_own() -> None:
    known = {key.variable for key in KEYS.values()}
    for name in PROCESSES:
        environ = config(OUTRIGGER_API_KEY="k")["services"][name]["environment"]
        assert set(environ) <= known, set(environ) - known
        settings = load_settings(None, environ)
        assert settings.bridge.worker_host == "127.0.0.1"
        assert settings.worker.n_ctx == settings.host.n_ctx or name != "worker"
    assert config(OUTRIGGER_API_KEY="k")["services"]["gateway"]["environment"]["OUTRIGGER_API_KEY"] == "k"


def test_the_journal_is_at_one_path_for_all_who_read_it_and_written_by_the_broker_alone() -> None:
    services = config()["services"]
    mounts = {
        name: [str(volume) for volume in services[name].get("volumes", []) if ":/journal" in str(volume)]
        for name in SYSTEM
    }
    assert [re.sub(r":rw$", "", *mounts.pop("broker"))] == ["journal:/journal"]
    assert {name: found for name, found in mounts.items() if found} == {
        "mac": ["journal:/journal:ro"],
        "bridge": ["journal:/journal:ro"],
    }
    folders = {
        load_settings(None, services[name]["environment"]).broker.journal_dir for name in PROCESSES[1:4]
    }
    assert folders == {"/journal/pages"}
    assert "/journal\n" in (TOP / "Dockerfile").read_text(), (
        "a volume takes its owner from the image's folder"
    )


def test_every_process_that_serves_metrics_is_watched_at_the_port_that_prometheus_scrapes() -> None:
    scraped = dict(
        re.findall(
            r'targets: \["127.0.0.1:(\d+)"\]\n +labels: { process: (\w+) }',
            (TOP / "monitoring" / "prometheus.yml").read_text(),
        )
    )
    assert sorted(scraped.values()) == ["bridge", "broker", "gateway", "mac"]
    services = config()["services"]
    for port, name in scraped.items():
        if name != "gateway":  # its API is asked instead
            assert f":{port}/metrics" in services[name]["healthcheck"]["test"][-1]


def test_what_is_mounted_is_there() -> None:
    for name, service in config("--profile", "monitoring")["services"].items():
        for volume in service.get("volumes", []):
            source = str(volume).split(":")[0]
            if source.startswith("/"):
                assert Path(source).exists(), f"{name} mounts {source}, which is not in the checkout"


def test_the_image_is_made_in_two_stages_and_runs_as_nobody() -> None:
    text = (TOP / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert stages == ["build", "serve"]
    assert config()["services"]["gateway"]["build"]["target"] == stages[-1]
    serve = text.split("AS serve")[1]
    assert re.search(r"^USER outrigger$", serve, re.MULTILINE)
    assert ".venv" in (TOP / ".dockerignore").read_text().split()
