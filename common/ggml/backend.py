"""Which device computes, with which threads and which memory layouts.

`devices_for` names those the installed libraries know, best first (a GPU where there is one: Metal on a Mac; then the
CPU). `Backend` runs graphs on it. `weight_layouts` names the memory layouts weights may be copied into: on a CPU the
repacked ones are faster than the file's own; the AMX one is offered only where a child process has proven that it does
not fault (see amx_probe.py). Knows nothing of models; used by common/engine.
"""

from __future__ import annotations

import ctypes as C
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import EngineError, OutOfMemoryError

from .ffi import (
    DEVICE_CPU,
    DEVICE_GPU,
    DEVICE_IGPU,
    STATUS_SUCCESS,
    DeviceProps,
    ThreadpoolParams,
    lib,
    library_folder,
)
from .log import complaints, forget_complaints

AMX_LAYOUT = "AMX"
AMX_PROBE_SECONDS_MAX = 60
N_THREADS_MAX = 512
CACHE_LINE_BYTES = 64
POLL_PERCENT = 50
"""How long an idle pool thread spins before it sleeps: ggml's own default."""


@dataclass(frozen=True)
class Device:
    """One entry of libggml's device registry."""

    name: str
    description: str
    kind: int
    maps_host_memory: bool
    ptr: int

    @property
    def is_cpu(self) -> bool:
        """True for the CPU itself."""
        return self.kind == DEVICE_CPU


def devices() -> list[Device]:
    """Every device of the installed libraries."""
    found = []
    if not lib.ggml_backend_dev_count():  # builds that load their devices as plugins have none until told
        lib.ggml_backend_load_all_from_path(str(library_folder()).encode())
    for i in range(lib.ggml_backend_dev_count()):
        ptr = lib.ggml_backend_dev_get(i)
        props = DeviceProps()
        lib.ggml_backend_dev_get_props(ptr, C.byref(props))
        name, description = (props.name or b"").decode(), (props.description or b"").decode()
        found.append(Device(name, description, props.type, props.caps.buffer_from_host_ptr, ptr))
    return found


def devices_for(wanted: str = "auto") -> list[Device]:
    """Devices to compute on, best first: `auto` (GPUs, then the CPU), `cpu`, or a device's name.

    Raises EngineError naming the devices there are.
    """
    found = devices()
    if wanted == "auto":
        order = {DEVICE_GPU: 0, DEVICE_IGPU: 1, DEVICE_CPU: 2}
        candidates = sorted((d for d in found if d.kind in order), key=lambda d: order[d.kind])
    else:
        candidates = [d for d in found if d.name.lower() == wanted.lower()]
    if not candidates:
        names = ", ".join(d.name for d in found) or "none"
        raise EngineError(f"no device {wanted!r}; this machine offers: {names}")
    return candidates


def choose_device(wanted: str = "auto") -> Device:
    """The best of devices_for."""
    return devices_for(wanted)[0]


class Backend:
    """A device made ready to compute, with its own threads when it is the CPU."""

    def __init__(self, device: Device, n_threads: int = 1) -> None:
        if not 1 <= n_threads <= N_THREADS_MAX:
            raise EngineError(f"n_threads is {n_threads}; allowed are 1 to {N_THREADS_MAX}")
        self.device, self.n_threads = device, n_threads
        self._pool: int | None = None
        self._work = _aligned(0)
        self._ptr: int | None = lib.ggml_backend_dev_init(device.ptr, None)
        if not self._ptr:
            raise EngineError(f"device {device.name} did not start: {complaints('no reason given')}")
        if device.is_cpu:
            self._start_threads()
        self.buffer_type: int = lib.ggml_backend_get_default_buffer_type(self._ptr)

    def _start_threads(self) -> None:
        # Without a pool of our own, ggml builds and drops one for every graph where OpenMP is off.
        params = ThreadpoolParams()
        lib.ggml_threadpool_params_init(C.byref(params), self.n_threads)
        params.poll = POLL_PERCENT
        self._pool = lib.ggml_threadpool_new(C.byref(params))
        if not self._pool:
            raise OutOfMemoryError(f"no pool of {self.n_threads} threads could be started")

    @property
    def name(self) -> str:
        """Name of the device, as libggml calls it."""
        return self.device.name

    def supports(self, node_ptr: int) -> bool:
        """True when the device can run this node as it is (types, shapes, where its weights live)."""
        return lib.ggml_backend_supports_op(self._ptr, node_ptr)

    def compute(self, graph_ptr: int, n_threads: int | None = None) -> None:
        """Runs a graph to its end, on fewer threads than there are if n_threads says so (on a CPU). Raises EngineError.

        Other Python threads run meanwhile.
        """
        if self.device.is_cpu:
            status = self._compute_here(graph_ptr, min(n_threads or self.n_threads, self.n_threads))
        else:
            status = lib.ggml_backend_graph_compute(self._ptr, graph_ptr)
        if status != STATUS_SUCCESS:
            raise EngineError(
                f"{self.name} failed to compute (status {status}): {complaints('no reason given')}"
            )

    def _compute_here(self, graph_ptr: int, n_threads: int) -> int:
        """Runs a graph on the CPU in work memory of ours, which begins where a cache line does. Returns the status.

        The library's own work memory lies wherever the heap puts it. Flash attention keeps its queries and sums there;
        when each of them straddles two lines, a read at depth takes a third longer (docs/measurements.md).
        """
        plan = lib.ggml_graph_plan(graph_ptr, n_threads, self._pool)
        if not 1 <= plan.n_threads <= n_threads:
            raise EngineError(
                f"the library plans for {plan.n_threads} threads of {n_threads}: not the pinned version"
            )
        if plan.work_size > self._work.nbytes:
            self._work = _aligned(plan.work_size)
        plan.work_data = self._work.ctypes.data
        return lib.ggml_graph_compute(graph_ptr, C.byref(plan))

    def map_host_memory(self, memory: np.ndarray, tensor_bytes_max: int) -> int | None:
        """A buffer over memory that is mapped already (a model file), page-aligned; None when the device cannot."""
        if not self.device.maps_host_memory:
            return None
        return lib.ggml_backend_dev_buffer_from_host_ptr(
            self.device.ptr, memory.ctypes.data, memory.nbytes, tensor_bytes_max
        )

    def close(self) -> None:
        """Frees the device and its threads. Calling it again does nothing."""
        if self._ptr:
            lib.ggml_backend_free(self._ptr)
        if self._pool:
            lib.ggml_threadpool_free(self._pool)
        self._ptr = self._pool = None


def _aligned(n_bytes: int) -> np.ndarray:
    """u8 [n_bytes] that begins on a cache line. Raises OutOfMemoryError."""
    try:
        memory = np.empty(n_bytes + CACHE_LINE_BYTES, np.uint8)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"no memory for {n_bytes} bytes of work space; choose a smaller ubatch"
        ) from error
    offset = -memory.ctypes.data % CACHE_LINE_BYTES
    return memory[offset : offset + n_bytes]


def extra_layouts(device: Device) -> dict[str, int]:
    """Buffer types beside the default one in which the device keeps weights rearranged: name -> buffer type."""
    registry = lib.ggml_backend_dev_backend_reg(device.ptr)
    entry = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not entry:
        return {}
    array = C.CFUNCTYPE(C.POINTER(C.c_void_p), C.c_void_p)(entry)(device.ptr)
    layouts: dict[str, int] = {}
    while array and array[len(layouts)]:
        buffer_type = array[len(layouts)]
        layouts[lib.ggml_backend_buft_name(buffer_type).decode()] = buffer_type
    return layouts


def weight_layouts(device: Device) -> dict[str, int]:
    """As extra_layouts, without those that would kill the process on this machine."""
    layouts = extra_layouts(device)
    if AMX_LAYOUT in layouts and not amx_is_safe():
        del layouts[AMX_LAYOUT]
    return layouts


@functools.cache
def amx_is_safe() -> bool:
    """True when a child process ran AMX kernels and lived.

    Some virtual machines advertise AMX and kill the process that uses it; nothing but trying tells them apart.
    """
    forget_complaints()
    command = [sys.executable, "-m", "common.ggml.amx_probe"]
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, timeout=AMX_PROBE_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
