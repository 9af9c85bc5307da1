"""One measurement of llama.cpp reading a prompt: alone, or split over its RPC backend in one of its two ways.

    Way(n_far=15, n_ubatch=256)                 one server; the host's own CPU keeps the first layers (-ngl)
    Way(n_far=15, n_ubatch=256, in_turn=True)   a server on either core, and layers dealt out by -ts: only then does
                                                llama.cpp run ubatches in turn on both (its pipeline needs two devices)

Pinned like our own processes: llama-bench and the near server on the host's core, the far server on the worker's.
Knows nothing of figures. Used by services.bench.rpc.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.errors import ServiceError
from services.bench.processes import free_port
from services.bench.report import NotMeasuredError
from services.bench.rpc_build import RpcPrograms

RUN_S_MAX, START_S_MAX = 600.0, 20.0
SAID_CHARACTERS = 800


@dataclass(frozen=True)
class Way:
    """How the layers lie. n_far: layers on the far server; 0 is llama.cpp alone."""

    n_far: int
    n_ubatch: int
    in_turn: bool = False

    @property
    def name(self) -> str:
        if not self.n_far:
            return f"alone, ubatch {self.n_ubatch}"
        return f"{self.n_far} layers far by {'-ts' if self.in_turn else '-ngl'}, ubatch {self.n_ubatch}"

    def arguments(self, n_layer: int, near: str, far: str) -> list[str]:
        """What llama-bench is told. near, far: address:port of the servers."""
        said = ["-ub", str(self.n_ubatch)]
        if not self.n_far:
            return [*said, "-ngl", "0"]
        if not self.in_turn:
            return [*said, "-rpc", far, "-ngl", str(self.n_far)]
        dealt = f"{n_layer - self.n_far}/{self.n_far}"
        return [*said, "-rpc", f"{near},{far}", "-ngl", str(n_layer + 1), "-ts", dealt]


@dataclass(frozen=True)
class Run:
    """One read. far_cpu_s: processor time of the far server meanwhile, its evidence of having taken part."""

    read_s: float
    far_cpu_s: float


class Bench:
    """llama-bench for one model. cores: (host's, worker's); None pins nothing."""

    def __init__(
        self, programs: RpcPrograms, model: Path, n_layer: int, cores: tuple[int | None, int | None]
    ) -> None:
        self._programs, self._model, self._n_layer = programs, model, n_layer
        self._host_core, self._far_core = cores

    def read(self, way: Way, n_tokens: int) -> Run:
        """Seconds of one warm read of n_tokens. Raises ServiceError, NotMeasuredError."""
        with ExitStack() as stack:
            near, far = "", ""
            server = None
            if way.n_far:
                far, server = self._serve(stack, self._far_core)
                near = self._serve(stack, self._host_core)[0] if way.in_turn else ""
            command = [str(self._programs.bench), "-m", str(self._model), "-p", str(n_tokens), "-n", "0"]
            command += ["-t", "1", "-r", "1", "-fa", "on", "-o", "json"]
            command += way.arguments(self._n_layer, near, far)
            said = _output(command, self._host_core)
            cpu_s = _cpu_s(server.pid) if server else 0.0
        return Run(read_seconds(said, n_tokens, way), cpu_s)

    def _serve(self, stack: ExitStack, core: int | None) -> tuple[str, subprocess.Popen[bytes]]:
        """Start a server, ended with the stack; returns its address and process."""
        port = free_port()
        command = [str(self._programs.server), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_pin(core),
        )
        stack.callback(server.wait)
        stack.callback(server.kill)
        until_s = time.monotonic() + START_S_MAX
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return f"127.0.0.1:{port}", server
            except OSError as error:
                if server.poll() is not None or time.monotonic() > until_s:
                    raise ServiceError(f"{self._programs.server.name} does not listen: {error}") from error
                time.sleep(0.05)


def read_seconds(said: str, n_tokens: int, way: Way) -> float:
    """Seconds of the one sample in llama-bench's JSON. Raises NotMeasuredError when it did not do what was asked."""
    try:
        (found,) = json.loads(said)
        facts: tuple[Any, ...] = (found["n_prompt"], found["n_ubatch"], found["n_threads"])
        (sample_ns,) = found["samples_ns"]
        backends = str(found["backends"])
    except (ValueError, KeyError, TypeError) as error:
        raise NotMeasuredError(f"llama-bench said something else than one sample: {error}") from error
    if facts != (n_tokens, way.n_ubatch, 1) or ("RPC" in backends) != bool(way.n_far):
        raise NotMeasuredError(f"{way.name}: llama-bench ran {facts} on {backends}")
    return float(sample_ns) / 1e9


def _output(command: list[str], core: int | None) -> str:
    """Standard output of a pinned command. Raises ServiceError with the end of what it said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False, preexec_fn=_pin(core)
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"llama-bench took more than {RUN_S_MAX:.0f} s") from error
    if done.returncode:
        raise ServiceError(
            f"llama-bench ended with status {done.returncode}:\n{done.stderr[-SAID_CHARACTERS:]}"
        )
    return done.stdout


def _pin(core: int | None) -> Callable[[], None] | None:
    if core is None or not hasattr(os, "sched_setaffinity"):
        return None
    return lambda: os.sched_setaffinity(0, {core})


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
