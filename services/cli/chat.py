"""`outrigger chat`: talk to the running model in the terminal, over the ZeroMQ client."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from common.config import find_file, load_settings
from common.errors import OutriggerError, RequestError, ServiceError, SettingError
from services.client import CurveKeys, OutriggerClient, PieceWritten, Queued, ReadingPrompt
from services.launch.lock import running
from services.runtime.bus import public_key_of
from services.runtime.endpoints import PUBLIC_SOCKET, ipc_endpoint
from services.runtime.key_files import read_key

HELP = "Ctrl-C stops an answer, /new forgets the talk, Ctrl-D or /quit leaves."


@click.command()
@click.option("--endpoint", metavar="ADDRESS", help="Where the gateway listens.  [this machine's, over ipc]")
@click.option("--secret-file", help="Our CURVE secret key, for a gateway on another machine.")
@click.option("--gateway-key-file", help="The gateway's public CURVE key.")
@click.option("--system", "system_text", help="Instructions before the talk.")
@click.option("--temperature", type=float, default=0.2, help="0 is greedy.  [0.2: small models stray at 1]")
@click.option("--max-tokens", type=int, help="Longest answer.  [what the context holds]")
def command(
    endpoint: str | None,
    secret_file: str | None,
    gateway_key_file: str | None,
    system_text: str | None,
    **sampling: Any,
) -> None:
    """Talk to the model that runs (`outrigger run`).

    Ctrl-C stops an answer and not the program; /new forgets the talk; Ctrl-D or /quit leaves.
    """
    keys = _keys(secret_file, gateway_key_file)
    with OutriggerClient(endpoint or _endpoint_here(), keys=keys) as client:
        try:
            state = client.status()
        except ServiceError as error:
            run_dir = load_settings(find_file(os.environ), os.environ).run_dir
            if endpoint or running(run_dir) is not None:
                raise
            raise _nothing_runs(run_dir) from error  # the file of a socket stays when its owner ends
        click.echo(f"{state.model}, {state.n_ctx} tokens of context, worker {state.worker.state}. {HELP}")
        parameters = {name: value for name, value in sampling.items() if value is not None}
        Talk(client, system_text, parameters).run()


class Talk:
    """One conversation: what was said so far, and the next turn."""

    def __init__(self, client: OutriggerClient, system_text: str | None, parameters: dict[str, Any]) -> None:
        self._client = client
        self._opening = [{"role": "system", "content": system_text}] if system_text else []
        self._messages: list[dict[str, Any]] = list(self._opening)
        self._parameters = parameters

    def run(self) -> None:
        """Turn after turn, until the person leaves."""
        if sys.stdin.isatty():
            import readline  # noqa: F401 (gives input() its line editing)
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo("\n" + HELP)
                continue
            if text == "/quit":
                return
            if text == "/new":
                self._messages = list(self._opening)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        """One question and its answer. An answer that was stopped stays in the talk as far as it went."""
        asked: dict[str, Any] = {"role": "user", "content": text}
        answer: list[str] = []
        try:
            self._listen([*self._messages, asked], answer)
        except KeyboardInterrupt:
            _progress("")
            click.echo(" (stopped)")
        except OutriggerError as error:
            _progress("")
            click.echo(f"\n{error}", err=True)
            if isinstance(error, RequestError) and not answer:
                return  # it was not a question the model could be asked: as if it had not been
        self._messages += [asked, {"role": "assistant", "content": "".join(answer)}]

    def _listen(self, messages: list[dict[str, Any]], answer: list[str]) -> None:
        with self._client.generate(messages=messages, **self._parameters) as generation:
            for update in generation.updates():
                match update:
                    case Queued(ahead=ahead) if ahead:
                        _progress(f"waiting, {ahead} before us")
                    case ReadingPrompt(tokens_done=done, tokens_total=total):
                        _progress(f"reading, {done} of {total} tokens")
                    case PieceWritten(text=piece) if piece:
                        if not answer:
                            _progress("")
                        answer.append(piece)
                        click.echo(piece, nl=False)
        click.echo()


def _progress(text: str) -> None:
    """A line that the next one replaces; only where somebody watches."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def _endpoint_here() -> str:
    """The ipc endpoint of the run directory that the settings name."""
    settings = load_settings(find_file(os.environ), os.environ)
    if not (settings.run_dir / PUBLIC_SOCKET).exists():
        raise _nothing_runs(settings.run_dir)
    return ipc_endpoint(settings.run_dir / PUBLIC_SOCKET)


def _nothing_runs(run_dir: Path) -> ServiceError:
    return ServiceError(
        f"nothing runs (run directory {run_dir}): `outrigger up` starts it, --endpoint names a gateway elsewhere"
    )


def _keys(secret_file: str | None, gateway_key_file: str | None) -> CurveKeys | None:
    if not secret_file and not gateway_key_file:
        return None
    if not secret_file or not gateway_key_file:
        raise SettingError("give both --secret-file and --gateway-key-file, or neither")
    secret = read_key(secret_file, "--secret-file")
    return CurveKeys(
        public_key_of(secret), secret, frozenset({read_key(gateway_key_file, "--gateway-key-file")})
    )
