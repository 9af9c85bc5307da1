"""The one door to libllama: loads it once, keeps it quiet, remembers what it complained about.

libllama serves three things here and nothing else: the vocabulary (vocabulary.py), the samplers (sampler.py) and the
stock model that our engine is compared with (stock.py). Graphs are built on ggml directly and do not pass through
this file. It does not know models, text or tensors.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from types import ModuleType

from llama_cpp import llama_cpp as native

from common.errors import ModelError

LOG_LEVEL_WARN = 3
LOG_LEVEL_CONTINUED = 5
COMPLAINTS_MAX = 20

_lock = Lock()
_started = False
_complaints: collections.deque[str] = collections.deque(maxlen=COMPLAINTS_MAX)
_last_level = 0


@native.llama_log_callback
def _keep_complaint(level: int, text: bytes, _user_data: object) -> None:
    """Receives every log line of libllama and ggml; keeps warnings and errors for error texts, drops the rest."""
    global _last_level
    if level != LOG_LEVEL_CONTINUED:
        _last_level = level
    line = text.decode("utf-8", "replace").strip()
    if line.strip(".") and _last_level >= LOG_LEVEL_WARN:
        _complaints.append(line)


def llama() -> ModuleType:
    """The bindings of libllama, initialised and silenced on first use. Safe to call from any thread."""
    global _started
    with _lock:
        if not _started:
            native.llama_log_set(_keep_complaint, None)
            native.llama_backend_init()
            _started = True
    return native


@contextlib.contextmanager
def complaints() -> Iterator[list[str]]:
    """Collects what libllama says inside the block, so that an error can carry the cause it named."""
    _complaints.clear()
    heard: list[str] = []
    try:
        yield heard
    finally:
        heard.extend(_complaints)


def require_gguf(path: Path) -> None:
    """Refuses what is no readable GGUF file before native code sees it. Raises ModelError with path and remedy."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(
            f"cannot read the model file {path}: {error.strerror}; give the path of a GGUF file (OUTRIGGER_MODEL)"
        ) from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not with b'GGUF'")


def load_model_native(path: Path, params: object) -> int:
    """llama_model_load_from_file with a reason when it fails. Returns the native model handle; the caller frees it.

    Raises ModelError carrying the last lines libllama wrote about it.
    """
    require_gguf(path)
    with complaints() as heard:
        model = llama().llama_model_load_from_file(str(path).encode(), params)
    if not model:
        cause = "; ".join(heard[-3:]) or "no reason given"
        raise ModelError(f"the model file {path} could not be loaded: {cause}")
    return model
