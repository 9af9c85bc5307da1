"""A coverage-guided fuzzer on the link's codec: `python -m services.bench.fuzz.guided RUNS SEED`

Atheris changes the input until it reaches code that nothing reached before. An extra (`fuzz`), run in a process of its
own because it takes over exits and signals. Prints one line; exit code 0: no exception but the protocol's own.
"""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

RUNS_A_PROCESS_DEFAULT = 20_000
CORPUS_FILES = 200
CHOICES = 6


def write_corpus(folder: Path, seed: int) -> None:
    """Streams to begin with, so that the fuzzer need not invent hashes."""
    from services.bench.fuzz.codec import EPOCH, N_EMBD
    from services.bench.fuzz.frames import FrameMaker

    rng = random.Random(seed)
    maker = FrameMaker(rng, N_EMBD)
    for number in range(CORPUS_FILES):
        frames = [maker.frame(EPOCH, 1), maker.frame(EPOCH, 2)]
        (folder / f"{number}").write_bytes(
            bytes([number % CHOICES]) + b"".join(frame.data for frame in frames)
        )


def main(runs: int, seed: int) -> None:
    """Fuzz; atheris ends the process itself."""
    import atheris

    with atheris.instrument_imports(include=["common.wire"]):
        from common.errors import RemoteProtocolError
        from common.wire.link import Role
        from common.wire.rows import decode_rows
        from common.wire.tail_file import parse_manifest
        from services.bench.fuzz.codec import EPOCH, feed
        from services.bench.fuzz.frames import stamped

    def one_input(data: bytes) -> None:
        """The first byte chooses what the others are: a stream, the body of a frame with a right hash, a blob."""
        choice, rest = (data[0] % CHOICES, data[1:]) if data else (0, b"")
        role = (Role.WORKER, Role.HOST)[choice % 2]
        if choice < 2:
            feed(role, rest, 1 << 20)
        elif choice < 4:
            feed(role, stamped(rest[0] if rest else 0, EPOCH, 1, rest[1:]), 1 << 20)
        else:
            with suppress(RemoteProtocolError):
                (decode_rows, parse_manifest)[choice - 4](rest)

    with tempfile.TemporaryDirectory(prefix="outrigger-fuzz-") as folder:
        write_corpus(Path(folder), seed)
        options = [
            f"-atheris_runs={runs}",
            f"-seed={seed or 1}",
            "-max_len=4096",
            "-rss_limit_mb=1024",
            folder,
        ]
        atheris.Setup([sys.argv[0], *options], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS_A_PROCESS_DEFAULT, int((sys.argv + ["1"] * 3)[2]))
