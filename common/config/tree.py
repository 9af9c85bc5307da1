"""Every setting there is: name, default, allowed range and one sentence, grouped by the process that gets it.

A setting is known by its path in the tree (`bridge.worker_port`: a file's section and key) and by one flat name,
which makes its environment variable (OUTRIGGER_WORKER_PORT) and its flag (--worker-port). The flat name is the
field's own unless `flat` says otherwise; load.py checks that no two settings share one. A default of None means
"auto": load.py, or the process that knows more, works the value out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from common import limits
from common.config.leaf import LayerNumber, Leaf
from common.config.leaf import says as _says
from common.config.worker_tree import WorkerSettings

EMBEDDED_MODEL = "smollm2-135m-instruct-q4_1.gguf"
"""The model that `make setup` brings; what is run when no other is named."""


class RunSettings(Leaf, frozen=True):
    """Where a set of processes keeps its things."""

    data_dir: Annotated[str, _says("folder of models, tail files and wheels")] = ""
    run_dir: Annotated[
        str, _says("private folder (mode 0700) of sockets, logs and state; short, sockets need it")
    ] = ""
    silence_s: Annotated[
        float,
        _says(
            "seconds without a sign of life after which a process is ended and started again", ge=3, le=86_400
        ),
    ] = 20.0
    stall_s: Annotated[
        float,
        _says(
            "seconds without a turn of its working thread after which a process is ended and started again",
            ge=3,
            le=86_400,
        ),
    ] = 300.0


class HostSettings(Leaf, frozen=True):
    """The model on the host, and when the worker takes part."""

    model: Annotated[str, _says("GGUF file of a supported architecture")] = ""
    n_ctx: Annotated[
        int, _says("tokens of context", ge=512, le=limits.N_CTX_MAX, multiple_of=limits.KV_PAD_TOKENS)
    ] = 8192
    n_threads: Annotated[int, _says("computing threads of the host", flat="threads", ge=1, le=512)] = 0
    weights: Annotated[
        Literal["repack", "plain"],
        _says("layout of the weights in memory; repack is faster on most processors"),
    ] = "repack"
    decode: Annotated[
        Literal["auto", "paged", "fused"],
        _says(
            "how single tokens attend: fused as stock llama.cpp does, to the bit, or paged (faster at depth on one "
            "thread); auto: paged where n_ctx is above the limit of the host's memory, else fused"
        ),
    ] = "auto"
    page_tokens: Annotated[
        int,
        _says(
            "keys of a page, with decode = paged",
            ge=limits.PAGE_PAD_TOKENS,
            le=limits.N_CTX_MAX,
            multiple_of=limits.PAGE_PAD_TOKENS,
        ),
    ] = limits.PAGE_TOKENS
    group_pages: Annotated[
        int, _says("pages whose results are folded before the groups are, with decode = paged", ge=1, le=1024)
    ] = limits.GROUP_PAGES
    kv_host_tokens: Annotated[
        int,
        _says(
            "tokens whose keys and values stay in the host's memory; older ones go to the journal and the worker",
            ge=512,
            le=limits.N_CTX_MAX,
            multiple_of=limits.UBATCH_TOKENS,
        ),
    ] = limits.KV_HOST_TOKENS
    kv_host_bytes: Annotated[
        int, _says("the same limit in bytes; the lower one counts, 0: tokens alone", ge=0, le=1 << 50)
    ] = 0
    hold: Annotated[
        Literal["on", "off"],
        _says(
            "on: keys and values beyond the host's limit go to the journal and the worker; off: all stay in memory"
        ),
    ] = "on"
    stagger: Annotated[
        Literal["on", "off"],
        _says(
            "on: past the host's limit two ubatches of a read run staggered, so that a worker attends for one while "
            "the host computes the other; off: one after the other"
        ),
    ] = "on"
    shadow_every: Annotated[
        int,
        _says(
            "one group of pages in so many that a worker attends is attended here, too, and compared; 0: none",
            ge=0,
            le=1 << 31,
        ),
    ] = 1000
    split: Annotated[Literal["on", "off"], _says("whether a worker may take part in reading prompts")] = "on"
    split_layer: Annotated[
        LayerNumber | None,
        _says("first layer that the worker runs; unset: chosen from both sides' measured times"),
    ] = None
    split_tokens_min: Annotated[
        int, _says("shortest read, in new tokens, that uses the worker", ge=2, le=limits.N_CTX_MAX)
    ] = limits.SPLIT_TOKENS_MIN
    split_decode: Annotated[
        Literal["on", "off"],
        _says(
            "on: the host loads only the layers before split_layer; the worker runs the rest and the output for every "
            "token, so that a model larger than the host runs, and nothing runs without it"
        ),
    ] = "off"
    split_decode_wait_s: Annotated[
        float,
        _says(
            "seconds that a request waits for a lost worker, with split_decode, before it fails",
            ge=0,
            le=86_400,
        ),
    ] = 60.0
    split_guard: Annotated[
        Literal["on", "off"],
        _says("whether a read leaves a worker that does not make it faster; off: it takes part all the same"),
    ] = "on"
    short_ctx: Annotated[
        int,
        _says(
            "tokens of the second sequence, in which short requests are served beside a long one; 0 is off",
            ge=0,
            le=limits.N_CTX_MAX,
            multiple_of=limits.KV_PAD_TOKENS,
        ),
    ] = 2048
    canonical: Annotated[
        Literal["idle", "off"],
        _says(
            "idle: an answer's tokens are run again as a read when there is nothing else to do, so that the next turn "
            "reuses its rows; off: the next turn reads them"
        ),
    ] = "idle"
    snapshot_mib: Annotated[
        int,
        _says(
            "MiB of recurrent states kept, so that a hybrid model's later turns need not be read from the start",
            ge=0,
            le=1 << 20,
        ),
    ] = 1024
    worker_rest_s: Annotated[
        float, _says("seconds that a worker is left alone after it failed", ge=0, le=86_400)
    ] = 60.0


class GatewaySettings(Leaf, frozen=True):
    """The HTTP side."""

    http_host: Annotated[
        str, _says("address the API listens on; 127.0.0.1 is this machine only", min_length=1)
    ] = "127.0.0.1"
    http_port: Annotated[int, _says("port of the API; 0 takes a free one", ge=0, le=65_535)] = 8080
    requests_waiting_max: Annotated[
        int, _says("requests that may wait before others get 429", ge=0, le=10_000)
    ] = limits.REQUESTS_WAITING_MAX
    request_deadline_s: Annotated[
        float, _says("seconds after which a request is given up", gt=0, le=86_400)
    ] = 3600.0
    api_key: Annotated[
        str, _says("key that clients must send; needed when others than this machine can reach the API")
    ] = ""
    chat_template: Annotated[
        str, _says("Jinja file used in place of the model's own chat template; empty: the model's")
    ] = ""
    stream_comment_s: Annotated[
        float, _says("silence after which a stream gets a comment line with its progress", gt=0, le=60)
    ] = 10.0
    drain_s: Annotated[
        float, _says("seconds that running answers get to end when the host is stopped", ge=0, le=3600)
    ] = 10.0
    host_stall_s: Annotated[
        float,
        _says("seconds without a turn of the computing thread after which /health says so", ge=1, le=3600),
    ] = 120.0


class ZmqSettings(Leaf, frozen=True):
    """The gateway's door for programs that speak ZeroMQ."""

    door: Annotated[Literal["on", "off"], _says("whether programs may ask over ZeroMQ, too", flat="zmq")] = (
        "on"
    )
    host: Annotated[
        str,
        _says(
            "address of the ZeroMQ endpoints; other than loopback only with keys",
            flat="zmq_host",
            min_length=1,
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, _says("port of the ZeroMQ endpoint; 0 takes a free one", flat="zmq_port", ge=0, le=65_535)
    ] = 5570
    events_port: Annotated[
        int, _says("port of the ZeroMQ events; 0 takes a free one", flat="zmq_events_port", ge=0, le=65_535)
    ] = 5571
    secret_file: Annotated[
        str,
        _says(
            "our CURVE secret key (`outrigger keys new`); with it, tcp clients need keys",
            flat="zmq_secret_file",
        ),
    ] = ""
    clients_file: Annotated[
        str, _says("public CURVE keys of the clients that may come in, one a line", flat="zmq_clients_file")
    ] = ""
    lease_s: Annotated[
        float,
        _says("silence after which a client's requests are cancelled", flat="zmq_lease_s", ge=1, le=3600),
    ] = 60.0
    stall_s: Annotated[
        float,
        _says("seconds that an answer waits for its client's credit", flat="zmq_stall_s", gt=0, le=3600),
    ] = 60.0


class BridgeSettings(Leaf, frozen=True):
    """Where the worker is."""

    worker_host: Annotated[
        str,
        _says(
            "address of the worker; auto: look for it at USB cables; usbmux: a phone behind usbmux; "
            "empty: `outrigger run` starts one on this machine"
        ),
    ] = ""
    worker_port: Annotated[int, _says("the worker's residual port", ge=0, le=65_535)] = 50_060
    worker_control_port: Annotated[int, _says("the worker's control port", ge=0, le=65_535)] = 50_061
    page_workers: Annotated[
        str,
        _says(
            "further workers that hold pages, each with a bridge: HOST or HOST:CONTROL_PORT, several with commas "
            "between; or a number: so many are started on this machine"
        ),
    ] = ""
    answer_s_first: Annotated[
        float, _says("seconds the worker has for its first chunk, before its pace is known", gt=0, le=3600)
    ] = 60.0
    answer_s_min: Annotated[
        float, _says("seconds below which no answer of the worker counts as late", gt=0, le=3600)
    ] = 3.0
    tail_file: Annotated[str, _says("tail file that workers may fetch (`outrigger worker --from`)")] = ""
    tail_host: Annotated[
        str,
        _says(
            "address where the tail file is served: loopback, or this machine's on the cable", min_length=1
        ),
    ] = "127.0.0.1"
    tail_port: Annotated[
        int, _says("port where the tail file is served; 0 takes a free one", ge=0, le=65_535)
    ] = 50_063
    chunk_window: Annotated[int, _says("residual chunks in flight", ge=1, le=limits.CHUNK_WINDOW_MAX)] = (
        limits.CHUNK_WINDOW
    )


class BrokerSettings(Leaf, frozen=True):
    """The process that keeps old pages: on disk in its journal, and on workers."""

    journal_dir: Annotated[str, _says("private folder (mode 0700) of the journal of old keys and values")] = (
        ""
    )
    journal_mib: Annotated[int, _says("MiB the journal may take on disk", ge=16, le=1 << 24)] = 16_384
    fsync: Annotated[
        Literal["off", "file", "page"],
        _says(
            "when pages are forced to the disk: off, the system decides; file, when a file is full and when nothing is "
            "written; page, before a page counts as kept"
        ),
    ] = "file"


class MetricsSettings(Leaf, frozen=True):
    """Where each process serves /metrics, on loopback."""

    gateway_port: Annotated[
        int,
        _says("/metrics of the gateway; 0 takes a free one", flat="gateway_metrics_port", ge=0, le=65_535),
    ] = 9570
    mac_port: Annotated[
        int,
        _says("/metrics of the mac process; 0 takes a free one", flat="mac_metrics_port", ge=0, le=65_535),
    ] = 9571
    broker_port: Annotated[
        int, _says("/metrics of the broker; 0 takes a free one", flat="broker_metrics_port", ge=0, le=65_535)
    ] = 9572
    bridge_port: Annotated[
        int, _says("/metrics of the bridge; 0 takes a free one", flat="bridge_metrics_port", ge=0, le=65_535)
    ] = 9573


class LogSettings(Leaf, frozen=True):
    """What is logged, and how it looks."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        _says("least important event that is logged", flat="log_level"),
    ] = "info"
    format: Annotated[
        Literal["auto", "json", "text"],
        _says("auto: text on a terminal, JSON lines elsewhere", flat="log_format"),
    ] = "auto"


class Settings(Leaf, frozen=True):
    """The tree. Each process hands its parts the leaves they need, never this."""

    run: RunSettings = RunSettings()
    host: HostSettings = HostSettings()
    gateway: GatewaySettings = GatewaySettings()
    zmq: ZmqSettings = ZmqSettings()
    bridge: BridgeSettings = BridgeSettings()
    worker: WorkerSettings = WorkerSettings()
    broker: BrokerSettings = BrokerSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()

    @property
    def run_dir(self) -> Path:
        """Folder of sockets, logs and state."""
        return Path(self.run.run_dir)

    @property
    def data_dir(self) -> Path:
        """Folder of models and tail files."""
        return Path(self.run.data_dir)
