"""The one door to libllama: loads it once and keeps it quiet.

libllama serves three things here and nothing else: the vocabulary (vocabulary.py), the samplers (sampler.py) and the
stock model that our engine is compared with (stock.py). Graphs are built on ggml directly and do not pass through
this file. It does not know models, text or tensors.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from types import ModuleType

from llama_cpp import llama_cpp as native

from common.errors import ModelError

from .log import complaints, forget_complaints, keep_complaint

_lock = Lock()
_started = False

# Importing llama_cpp has replaced the process-wide log callback by one that prints and chokes on damaged text.
native.llama_log_set(keep_complaint, None)


def llama() -> ModuleType:
    """The bindings of libllama, initialised and silenced on first use. Safe to call from any thread."""
    global _started
    with _lock:
        if not _started:
            native.llama_backend_init()
            _started = True
    return native


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
    forget_complaints()
    model = llama().llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ModelError(f"the model file {path} could not be loaded: {complaints('no reason given')}")
    return model
