"""Declarations: libraries, structs and functions of libggml, and nothing that decides anything.

`lib.ggml_mul_mat(...)` and its sisters are declared from the C prototypes in prototypes.py. The struct layouts are
checked against the library when this module is imported: a wheel with another ABI is refused before the first call.
Called by the other modules of common/ggml only.
"""

from __future__ import annotations

import ctypes as C
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import EngineError

from .prototypes import PROTOTYPES

WHEEL = "llama_cpp_python"
WHEEL_VERSION = importlib.metadata.version(WHEEL)

MAX_DIMS, MAX_OP_PARAMS, MAX_SRC, MAX_NAME, MAX_THREADS = 4, 64, 10, 64, 512
STATUS_SUCCESS = 0
DEVICE_CPU, DEVICE_GPU, DEVICE_IGPU, DEVICE_ACCEL = 0, 1, 2, 3
BUFFER_USAGE_WEIGHTS, BUFFER_USAGE_COMPUTE = 1, 2
PREC_F32 = 10
LIBRARIES = ("ggml-base", "ggml-cpu", "ggml")
SPIN_COUNT = 1000
"""How often a thread that waits for the others looks before it sleeps, where ggml is built with GNU OpenMP. Its own
default keeps on looking for milliseconds, several hundred times a token; when other programs want the cores, two
threads were then 3 to 15 times slower than one."""
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)  # read by the library when it is loaded below


class InitParams(C.Structure):
    """struct ggml_init_params"""

    _fields_ = [("mem_size", C.c_size_t), ("mem_buffer", C.c_void_p), ("no_alloc", C.c_bool)]


class GgufInitParams(C.Structure):
    """struct gguf_init_params"""

    _fields_ = [("no_alloc", C.c_bool), ("ctx", C.c_void_p)]


class TensorStruct(C.Structure):
    """struct ggml_tensor"""

    _fields_ = [
        ("type", C.c_int),
        ("buffer", C.c_void_p),
        ("ne", C.c_int64 * MAX_DIMS),
        ("nb", C.c_size_t * MAX_DIMS),
        ("op", C.c_int),
        ("op_params", C.c_int32 * (MAX_OP_PARAMS // 4)),
        ("flags", C.c_int32),
        ("src", C.c_void_p * MAX_SRC),
        ("view_src", C.c_void_p),
        ("view_offs", C.c_size_t),
        ("data", C.c_void_p),
        ("name", C.c_char * MAX_NAME),
        ("extra", C.c_void_p),
        ("padding", C.c_char * 8),
    ]


class ThreadpoolParams(C.Structure):
    """struct ggml_threadpool_params"""

    _fields_ = [
        ("cpumask", C.c_bool * MAX_THREADS),
        ("n_threads", C.c_int),
        ("prio", C.c_int),
        ("poll", C.c_uint32),
        ("strict_cpu", C.c_bool),
        ("paused", C.c_bool),
    ]


class ComputePlan(C.Structure):
    """struct ggml_cplan"""

    _fields_ = [
        ("work_size", C.c_size_t),
        ("work_data", C.c_void_p),
        ("n_threads", C.c_int),
        ("threadpool", C.c_void_p),
        ("abort_callback", C.c_void_p),
        ("abort_callback_data", C.c_void_p),
        ("use_ref", C.c_bool),
    ]


class DeviceCaps(C.Structure):
    """struct ggml_backend_dev_caps"""

    _fields_ = [
        ("is_async", C.c_bool),
        ("host_buffer", C.c_bool),
        ("buffer_from_host_ptr", C.c_bool),
        ("events", C.c_bool),
        ("mmap_support", C.c_bool),
    ]


class DeviceProps(C.Structure):
    """struct ggml_backend_dev_props"""

    _fields_ = [
        ("name", C.c_char_p),
        ("description", C.c_char_p),
        ("memory_free", C.c_size_t),
        ("memory_total", C.c_size_t),
        ("type", C.c_int),
        ("device_id", C.c_char_p),
        ("caps", DeviceCaps),
    ]


LOG_CALLBACK = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)

_BY_VALUE = {
    "ggml_init_params": InitParams,
    "gguf_init_params": GgufInitParams,
    "ggml_cplan": ComputePlan,
}
_HANDLES = {
    "ggml_backend_t",
    "ggml_backend_buffer_t",
    "ggml_backend_buffer_type_t",
    "ggml_backend_dev_t",
    "ggml_backend_reg_t",
    "ggml_gallocr_t",
    "ggml_threadpool_t",
    "ggml_log_callback",
}
_SCALARS = {
    "void": None,
    "bool": C.c_bool,
    "int": C.c_int,
    "float": C.c_float,
    "double": C.c_double,
    "size_t": C.c_size_t,
    "uint8_t": C.c_uint8,
    "uint32_t": C.c_uint32,
    "int64_t": C.c_int64,
}
_PROTOTYPE = re.compile(r"^(?P<result>.+?)\b(?P<name>g(?:gml|guf)_\w+)\((?P<arguments>.*)\)$")


def ctype_of(declaration: str) -> type | None:
    """The ctypes type of one C declaration such as `const char * name` or `size_t`; None for void."""
    words = declaration.replace("const ", "").strip()
    if "*" in words or "[" in words:
        return C.c_char_p if re.match(r"char\s*\*(?!\s*\*)", words) else C.c_void_p
    first = words.split()[0]
    if first == "enum":
        return C.c_int
    if first in _HANDLES:
        return C.c_void_p
    if first in _BY_VALUE:
        return _BY_VALUE[first]
    return _SCALARS[first]


def parse_prototypes(text: str) -> dict[str, tuple[type | None, list[type | None]]]:
    """Reads C prototypes: name -> (result type, argument types). KeyError on a type that is not declared above."""
    text = re.sub(r"//[^\n]*", "", text)
    signatures: dict[str, tuple[type | None, list[type | None]]] = {}
    for statement in text.split(";"):
        prototype = " ".join(statement.split())
        if not prototype:
            continue
        match = _PROTOTYPE.match(prototype)
        if match is None:
            raise ValueError(f"not a C prototype: {prototype!r}")
        arguments = match["arguments"].strip()
        types = [] if arguments == "void" else [ctype_of(a) for a in arguments.split(",")]
        signatures[match["name"]] = (ctype_of(match["result"]), types)
    return signatures


def library_folder() -> Path:
    """The folder of the wheel's shared libraries."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise EngineError(f"{WHEEL} is not installed; run `make setup`")
    return Path(spec.origin).parent / "lib"


def library_path(name: str) -> Path:
    """Path of one shared library of the wheel, by its plain name (`ggml-base`, `llama`)."""
    prefix, suffix = {"darwin": ("lib", ".dylib"), "win32": ("", ".dll")}.get(sys.platform, ("lib", ".so"))
    return library_folder() / f"{prefix}{name}{suffix}"


class Library:
    """All functions of prototypes.py as attributes, declared; missing ones are named at load."""

    def __init__(self) -> None:
        handles = [C.CDLL(str(library_path(name))) for name in LIBRARIES]
        missing = []
        for name, (result, arguments) in parse_prototypes(PROTOTYPES).items():
            function = next((getattr(h, name) for h in handles if hasattr(h, name)), None)
            if function is None:
                missing.append(name)
                continue
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        if missing:
            raise EngineError(f"{WHEEL} {WHEEL_VERSION} lacks {', '.join(missing)}; run `make setup` again")
        self._handles = handles

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def check_layouts(library: Library) -> None:
    """Compares the struct layouts declared above with what the library says. Raises EngineError."""
    ours = C.sizeof(TensorStruct) + 32  # a tensor in a context is preceded by a 32-byte ggml_object
    theirs = library.ggml_tensor_overhead()
    params = ThreadpoolParams()
    C.memset(C.byref(params), 0xAA, C.sizeof(params))
    library.ggml_threadpool_params_init(C.byref(params), 3)
    pool = (params.n_threads, params.strict_cpu, params.paused, any(params.cpumask))
    if ours != theirs or pool != (3, False, False, False):
        raise EngineError(
            f"{WHEEL} {WHEEL_VERSION} has other struct layouts (ggml_tensor {theirs} bytes, expected {ours}; "
            f"threadpool params {pool}); install the pinned version with `make setup`"
        )


lib = Library()
check_layouts(lib)
