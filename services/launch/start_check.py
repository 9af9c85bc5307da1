"""What can be known to be wrong before any process is started: the model, its chat template, addresses open to others.

Each process checks the same for itself; here it is told at once and alone, not out of a process's log. Starts and
opens nothing. Called by launch.py.
"""

from __future__ import annotations

from pathlib import Path

from common.config import Settings
from common.errors import ModelError, SettingError
from common.ggml.header import read_header
from common.model.spec import ModelSpec
from services.gateway.doors import is_loopback, require_key_off_loopback
from services.gateway.prompt import read_template
from services.gateway.public_endpoints import plan_endpoints
from services.gateway.template import ChatTemplate
from services.launch.programs import starts_worker

TEMPLATE_KEY = "tokenizer.chat_template"
NO_TEMPLATE = (
    "the model carries no chat template: /v1/chat/completions will refuse, /v1/completions serves. "
    "OUTRIGGER_CHAT_TEMPLATE names a Jinja file to use"
)


def check_start(settings: Settings) -> tuple[str, ...]:
    """Raises SettingError or ModelError for what could not run. Returns sentences for people: what will be missing."""
    model = Path(settings.host.model)
    spec = check_model(model)
    _check_addresses(settings)
    if settings.host.split_decode == "on" and settings.host.split == "off":
        raise SettingError(
            "split_decode is on and split is off (--no-worker, OUTRIGGER_SPLIT): without a worker the host has no "
            "last layers; drop one of them"
        )
    notes = [] if settings.host.n_ctx <= spec.n_ctx_train else [_beyond_training(settings.host.n_ctx, spec)]
    file = settings.gateway.chat_template
    template = read_template(file) if file else read_header(model).metadata.get(TEMPLATE_KEY)
    if template:
        ChatTemplate(str(template))
    else:
        notes.append(NO_TEMPLATE)
    return tuple(notes)


def _beyond_training(n_ctx: int, spec: ModelSpec) -> str:
    return (
        f"--n-ctx {n_ctx} is more than the {spec.n_ctx_train} tokens that the model was trained for: what it answers "
        f"to longer prompts may make no sense"
    )


def check_model(path: Path) -> ModelSpec:
    """The model that a file holds. Raises ModelError when `path` is not a whole model of a supported architecture."""
    if not path.is_file():
        what = f"{path} is not a file" if path.exists() else f"there is no model file {path}"
        raise ModelError(f"{what}: run `make setup`, or name another with --model")
    spec = ModelSpec.read(path)
    if len(spec.layers) < spec.n_layer_full:
        raise ModelError(
            f"{path} holds layers {spec.layers.start} to {spec.layers.stop - 1} of {spec.n_layer_full}: it is a "
            f"worker's tail. The host needs the model it was cut from; the tail is for `outrigger worker --model`"
        )
    return spec


def _check_addresses(settings: Settings) -> None:
    """No door is open to other machines without a key, and the worker's never is."""
    key = settings.gateway.api_key
    require_key_off_loopback(settings.gateway.http_host, key)
    if settings.zmq.door == "on":
        plan_endpoints(settings.zmq, settings.run_dir, has_api_key=bool(key))
    if starts_worker(settings) and not is_loopback(settings.worker.host):
        raise SettingError(
            f"worker.host = {settings.worker.host!r} (OUTRIGGER_LISTEN_HOST): the worker that is started here listens "
            f"on 127.0.0.1 only, its protocol has no key. The API's address is OUTRIGGER_HTTP_HOST (--host), and "
            f"needs OUTRIGGER_API_KEY; a worker on another machine is started there, by `outrigger worker`"
        )
