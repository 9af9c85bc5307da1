"""The unit of a user's systemd. Pure; used by services.launch.service.plan."""

from __future__ import annotations

from pathlib import Path

UNIT = "outrigger.service"
TEMPLATE = """\
[Unit]
Description=Outrigger: one language model on two devices
After=network.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
ExecStart={command}
WorkingDirectory={folder}
{environ}
Restart=on-failure
RestartSec=5
# 2: a bad setting; starting again does not make it better.
RestartPreventExitStatus=2
# The first SIGTERM, to `outrigger run` alone, drains: answers being written get time to end.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop_s}
UMask=0077
NoNewPrivileges=true
LogRateLimitIntervalSec=30
LogRateLimitBurst=2000

[Install]
WantedBy=default.target
"""


def unit(command: tuple[str, ...], folder: Path, environ: dict[str, str], stop_s: float) -> str:
    """The unit's text. stop_s: how long systemd waits between SIGTERM and SIGKILL."""
    lines = "\n".join(f"Environment={_quoted(f'{name}={value}')}" for name, value in environ.items())
    return TEMPLATE.format(
        command=" ".join(_quoted(word).replace("$", "$$") for word in command),
        folder=str(folder).replace("%", "%%"),
        environ=lines,
        stop_s=round(stop_s),
    )


def _quoted(word: str) -> str:
    """As systemd reads words: in quotes, its specifiers and escapes taken literally."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
