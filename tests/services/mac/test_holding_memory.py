"""Aim: past the host's limit a process takes no more memory, however long its sequence grows.

Method: a process of its own with the host's parts (engine, staggered reads, holding) and a broker that journals to a
file reads to four times the limit. Its anonymous and shared memory, as the system counts it, is compared with what it
was after the first pair of ubatches past the limit, which takes what reads by pages need. The model has many layers and
small pages, so that whatever is kept for each layer and page shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np

from common.config import HostSettings
from common.engine.engine import Decoding, Engine
from common.limits import UBATCH_TOKENS
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic
from tests.services.mac.test_holding import N_DECODED, SIZES, House, answer

GROWTH_MAX = 0.05
LIMIT = 2048
N_CTX = 4 * LIMIT


def resident_bytes() -> int:
    """Of this process: what is not backed by files."""
    words = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return 1024 * sum(int(word[1]) for word in words if word[0] in ("RssAnon:", "RssShmem:"))


def read_far(folder: Path) -> None:
    """Reads and decodes in this process; prints its bytes at every ubatch that begins."""
    path = folder / "deep.gguf"
    write_synthetic(Geometry(arch="llama", n_layer=12, **SIZES), path, storage="q8_0")
    settings = HostSettings(
        n_ctx=N_CTX, page_tokens=256, group_pages=2, kv_host_tokens=LIMIT, n_threads=1, decode="paged"
    )
    decoding = Decoding("paged", 256, 2, many_rows_from=LIMIT)
    bytes_at: dict[int, int] = {}
    with Engine.load(path, n_ctx=N_CTX, decoding=decoding, device="cpu") as engine:
        house = House(engine, folder, settings=settings, shadow_every=0)
        prompt = np.random.default_rng(1).integers(0, SIZES["n_vocab"], N_CTX).astype(np.int32)
        look = lambda at: bytes_at.setdefault(at, resident_bytes())  # noqa: E731
        answer(house.sequence, N_CTX - N_DECODED, look, prompt)
        print(json.dumps({"bytes_at": bytes_at, "released": house.holding.group_released}))
        house.close()


def test_memory_does_not_grow_past_the_limit(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        f"from {__name__} import Path, read_far; read_far(Path({str(tmp_path)!r}))",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["released"] >= 12, "of 16 groups"
    bytes_at = {int(at): n_bytes for at, n_bytes in told["bytes_at"].items()}
    first = bytes_at[LIMIT + 2 * UBATCH_TOKENS]
    last = median(n_bytes for at, n_bytes in bytes_at.items() if at > 3 * LIMIT)
    assert last <= (1 + GROWTH_MAX) * first, {at: n_bytes >> 10 for at, n_bytes in bytes_at.items()}
