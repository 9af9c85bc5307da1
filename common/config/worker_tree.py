"""The settings of a worker; the others are in tree.py, which puts all of them together."""

from __future__ import annotations

from typing import Annotated, Literal

from common import limits
from common.config.leaf import Leaf, Mebibytes, Port
from common.config.leaf import says as _says


class WorkerSettings(Leaf, frozen=True):
    """The far end of the cable: `outrigger worker`."""

    model: Annotated[str, _says("tail file, or a whole model", flat="tail")] = ""
    source: Annotated[
        str, _says("HOST or HOST:PORT of a bridge to fetch the tail file from", flat="tail_from")
    ] = ""
    host: Annotated[
        str, _says("address the worker listens on: loopback or link-local", flat="listen_host", min_length=1)
    ] = "127.0.0.1"
    port: Annotated[int, _says("residual port; 0 takes a free one", flat="listen_port", ge=0, le=65_535)] = (
        50_060
    )
    control_port: Annotated[
        int, _says("control port; 0 takes a free one", flat="listen_control_port", ge=0, le=65_535)
    ] = 50_061
    pages: Annotated[
        Literal["on", "off", "only"],
        _says(
            "whether the worker holds pages for hosts past their limit; only: it does nothing else and needs no model",
            flat="worker_pages",
        ),
    ] = "on"
    pages_port: Annotated[
        Port | None,
        _says("port for pages; 0 takes a free one; unset: the residual port plus 2", "listen_pages_port"),
    ] = None
    hold_mib: Annotated[
        Mebibytes | None, _says("MiB that held pages may take; unset: half of what is free when a host asks")
    ] = None
    n_threads: Annotated[
        int, _says("computing threads of the worker", flat="worker_threads", ge=1, le=512)
    ] = 0
    n_ctx: Annotated[
        int,
        _says(
            "tokens of context the worker's mirror holds; as many as the host's",
            flat="worker_ctx",
            ge=512,
            le=limits.N_CTX_MAX,
            multiple_of=limits.KV_PAD_TOKENS,
        ),
    ] = 8192
    weights: Annotated[
        Literal["repack", "plain"],
        _says("layout of the worker's weights; the host's must be the same", flat="worker_weights"),
    ] = "repack"
    snapshot_mib: Annotated[
        int,
        _says(
            "MiB of recurrent states the worker keeps, so that later turns of a hybrid model need not send them",
            flat="worker_snapshot_mib",
            ge=0,
            le=1 << 20,
        ),
    ] = 512
    frozen: Annotated[
        Literal["off", "interpreter", "coreml", "kernels"],
        _says(
            "what runs old groups of held pages as page programs: the Neural Engine (coreml, macOS), or for checks the "
            "interpreter or NumPy; off: ordinary kernels attend everything"
        ),
    ] = "off"
    frozen_mib: Annotated[
        int, _says("MiB that page programs may take, split evenly over layers", ge=1, le=1 << 20)
    ] = 4096
    frozen_share: Annotated[
        float, _says("share of a query's keys that page programs answer for, below 8 tokens", ge=0, le=1)
    ] = 0.22
    frozen_share_many: Annotated[float, _says("the same for queries of 8 and more tokens", ge=0, le=1)] = 0.43
    emulate: Annotated[
        str,
        _says(
            "link to emulate: loopback, usb-c, usb2 or wifi, and changes: usb-c,rtt=200us", "worker_emulate"
        ),
    ] = ""
    faults: Annotated[
        str,
        _says("faults to let happen, as docs/emulator.md spells them; @FILE reads a file", "worker_faults"),
    ] = ""
    fault_seed: Annotated[int, _says("seed of jitter and flipped bits", "worker_fault_seed", ge=0)] = 0
