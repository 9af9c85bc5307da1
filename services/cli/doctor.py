"""`outrigger doctor`: what stands in the way of running well, each finding with its remedy."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import msgspec

from common.config import Settings, find_file, load_settings
from common.errors import OutriggerError
from services.launch.doctor import machine, worker
from services.launch.doctor.facts import Facts, FarEnd
from services.launch.doctor.findings import Finding, cable_class, findings
from services.launch.doctor.journal import look_at_journal
from services.launch.inquiry import ask_launch
from services.launch.lock import running

SIGNS = {"well": "ok  ", "note": "note", "problem": "BAD "}


@click.command()
@click.option(
    "--profile", type=click.Path(path_type=Path), help="Write the facts as JSON; - is standard output."
)
@click.option("--model", metavar="FILE", help="GGUF file to serve.  [as set]")
@click.option("--worker-host", metavar="ADDRESS", help="A worker that runs elsewhere.  [as set]")
def command(profile: Path | None, model: str | None, worker_host: str | None) -> None:
    """Examine this machine, the cable and the worker: memory, the GPU's limit, speed, versions, disk, ports.

    Changes nothing. When the worker's link is free it is greeted and the cable measured; while a launch runs only its
    control channel is asked. A profile holds no host name, user, address or path.

    \b
    Exit codes: 0 nothing stands in the way, 1 something does, 2 a bad setting.
    """
    flags = {"model": model, "worker_host": worker_host}
    settings = load_settings(find_file(os.environ), os.environ, flags)
    facts = examine(settings)
    found = findings(facts)
    if profile and str(profile) == "-":
        click.echo(profile_text(facts, found))
    else:
        click.echo(text_of(found))
    if profile and str(profile) != "-":
        profile.write_text(profile_text(facts, found) + "\n", encoding="utf-8")
    if any(finding.level == "problem" for finding in found):
        raise SystemExit(1)


def examine(settings: Settings) -> Facts:
    """Look at everything."""
    runs = running(settings.run_dir) is not None
    address = _running_worker(settings) if runs else worker.worker_address(settings)
    interfaces = machine.look_at_interfaces()
    far_end = worker.ask_worker(address) if address else FarEnd(expected=False)
    if not address or runs or not far_end.reachable:
        why = "the link is in use" if runs else "no worker answers"
        cable = worker.unmeasured(address, interfaces, why, far_end.control_us)
    else:
        cable, refusal = worker.measure_cable(settings, address, interfaces)
        far_end = msgspec.structs.replace(far_end, greeted=not refusal, greeting=refusal)
    return Facts(
        _version(),
        machine.look_at_machine(),
        machine.look_at_model(settings),
        cable,
        far_end,
        machine.look_at_ports(settings) if not runs else (),
        runs,
        machine.disk_free_mb(settings),
        settings.broker.journal_mib,
        settings.host.split_decode == "on",
        look_at_journal(settings, runs=runs),
    )


def _running_worker(settings: Settings) -> tuple[str, int, int] | None:
    """The worker of the launch that runs here: the one it started, or the one that is set."""
    try:
        members = ask_launch(settings.run_dir).processes
    except OutriggerError:
        return worker.worker_address(settings)
    listens = next((each.listens for each in members if each.process == "worker"), {})
    if control := listens.get("control", ""):
        host, _, port = control.rpartition(":")
        return host, int(listens.get("link", ":0").rpartition(":")[2] or 0), int(port)
    return worker.worker_address(settings)


def text_of(found: list[Finding]) -> str:
    """A line for each finding, its remedy below."""
    width = max(len(finding.topic) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{SIGNS[finding.level]}  {finding.topic:{width}}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':6}{'':{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def profile_text(facts: Facts, found: list[Finding]) -> str:
    """Facts and findings as JSON."""
    shown = {
        **msgspec.to_builtins(facts),
        "cable_class": cable_class(facts.cable),
        "findings": [{"topic": each.topic, "level": each.level} for each in found],
    }
    for port in shown["ports"]:
        del port["holder"]  # a program's name is its user's business
    for part, name in (("worker", "why_not"), ("worker", "greeting"), ("model", "problem")):
        del shown[part][name]  # sentences that may name addresses and files; the findings' levels stay
    return msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()


def _version() -> str:
    try:
        return version("outrigger")
    except PackageNotFoundError:
        return "unknown"
