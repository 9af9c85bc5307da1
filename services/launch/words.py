"""What a person is told when everything runs. Text only."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path


def model_id(path: Path) -> str:
    """The model's name in the API: its file's name without the ending."""
    return path.stem


def curl_line(http: str, model: str, key_variable: str = "", *, chats: bool = True) -> str:
    """A request that works as it stands, for a shell; without a chat template (chats false) one that needs none."""
    text = "Name three things an outrigger is good for."
    asked = {"messages": [{"role": "user", "content": text}]} if chats else {"prompt": text}
    body = {"model": model, **asked, "max_tokens": 64}
    key = f' -H "Authorization: Bearer ${key_variable}"' if key_variable else ""
    return (
        f"curl -s {http}/v1/{'chat/' if chats else ''}completions -H 'Content-Type: application/json'{key} \\\n"
        f"  -d {shlex.quote(json.dumps(body))}"
    )


def ready_text(
    *,
    listens: Mapping[str, str],
    model: Path,
    chats: bool,
    worker: str,
    page_workers: str = "",
    run_dir: Path,
    seconds: float,
    has_key: bool,
    background: bool,
) -> str:
    """Everything runs: where, with what, and what to paste. listens: the gateway's addresses, by purpose."""
    http = listens["http"]
    lines = [
        f"ready after {seconds:.1f} s: {http}/v1",
        f"  model   {model_id(model)}  ({model})",
        f"  worker  {worker}",
        *([f"  pages   {page_workers}"] if page_workers else []),
        *(f"  {purpose:<7} {address}" for purpose, address in _zmq_lines(listens)),
        f"  logs    {run_dir}/*.log",
        "",
        curl_line(http, model_id(model), "OUTRIGGER_API_KEY" if has_key else "", chats=chats),
        "",
        "`outrigger down` stops everything." if background else "Ctrl-C stops everything.",
    ]
    return "\n".join(lines)


def _zmq_lines(listens: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Where programs ask and subscribe over ZeroMQ; over ipc only, when tcp stays closed."""
    for purpose, word in (("zmq", "zmq"), ("zmq_events", "events")):
        addresses = [listens[name] for name in (purpose, f"{purpose}_ipc") if name in listens]
        if addresses:
            yield word, "  ".join(addresses)
