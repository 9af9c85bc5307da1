"""Do both ends hold the same layers of the same model? A text about them, its hash, and what to say when they differ.

The text itself is written by common.model.spec; here it is only hashed and compared. Used by both ends of the cable.
"""

from __future__ import annotations

import hashlib

QUOTED_CHARS_MAX = 200


def fingerprint(text: str) -> bytes:
    """BLAKE2b (32 bytes) of a fingerprint text."""
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def difference(host_text: str, worker_text: str) -> str:
    """One line: where two texts first differ, what each side has there, and the remedy."""
    host, worker = host_text.splitlines(), worker_text.splitlines()
    both = zip(host, worker, strict=False)
    where = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), min(len(host), len(worker)))
    quoted = [
        (lines[where] if where < len(lines) else "nothing")[:QUOTED_CHARS_MAX] for lines in (host, worker)
    ]
    return (
        f"host and worker hold different models: the host has '{quoted[0]}', the worker '{quoted[1]}' "
        f"(line {where + 1} of their fingerprints); cut the worker's file from the host's model "
        f"(outrigger split MODEL TAIL) and restart the worker with it (outrigger worker --model TAIL)"
    )
