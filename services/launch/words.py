"""What a person is told when everything runs. Text only."""

from __future__ import annotations

import json
import shlex
from pathlib import Path


def model_id(path: Path) -> str:
    """The model's name in the API: its file's name without the ending."""
    return path.stem


def curl_line(http: str, model: str, key_variable: str = "") -> str:
    """A request that works as it stands, for a shell."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Name three things an outrigger is good for."}],
        "max_tokens": 64,
    }
    key = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
    return (
        f"curl -s {http}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"  -d {shlex.quote(json.dumps(body))}"
    )


def ready_text(
    *,
    http: str,
    model: Path,
    worker: str,
    run_dir: Path,
    seconds: float,
    has_key: bool,
    background: bool,
) -> str:
    """Everything runs: where, with what, and what to paste."""
    lines = [
        f"ready after {seconds:.1f} s: {http}/v1",
        f"  model   {model_id(model)}  ({model})",
        f"  worker  {worker}",
        f"  logs    {run_dir}/*.log",
        "",
        curl_line(http, model_id(model), "OUTRIGGER_API_KEY" if has_key else ""),
        "",
        "`outrigger down` stops everything." if background else "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)
