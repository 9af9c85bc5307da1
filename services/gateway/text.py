"""From a token's bytes to text that may leave: incremental UTF-8, and stop strings that never leak.

Pure. However the bytes are cut into tokens, the joined pieces equal the text decoded at once, up to the first stop
string.
Called by streams.py, once for each request.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Utf8Decoder:
    """Bytes in, text out. A code point that is not complete yet waits; bytes that can never become one are U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def waits(self) -> bool:
        """Whether a code point has begun and is not complete."""
        return bool(self._decoder.getstate()[0])

    def push(self, data: bytes) -> str:
        """The text that `data` completes."""
        return self._decoder.decode(data)

    def end(self) -> str:
        """What still waited: nothing, or U+FFFD for a code point that was never completed."""
        return self._decoder.decode(b"", final=True)


class StopScanner:
    """Lets text through up to the first stop string; holds back what may still become one.

    The first is the one that is complete first; of several complete at the same character, the longest. So the result
    does not depend on how the text is cut. The stop string itself and what follows it never leave.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """`stops`: non-empty strings."""
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The part of the text so far that may leave now."""
        if self.found is not None:
            return ""
        held = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if hits:
            _end, at, self.found = min(hits)
            self._held = ""
            return held[:at]
        keep = max((_open_prefix(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def end(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """Both in a row: the bytes of tokens in, text that may be sent out."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._decoder = Utf8Decoder()
        self._scanner = StopScanner(stops)
        self.n_decoded = 0
        """Characters that came in so far."""
        self.n_sent = 0
        """Characters that could leave so far."""

    @property
    def n_begun(self) -> int:
        """Characters that came in, one that is not complete yet included."""
        return self.n_decoded + self._decoder.waits

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._scanner.found is not None

    def push(self, data: bytes) -> str:
        """The text that may be sent now that a token brought `data`."""
        return self._scan(self._decoder.push(data))

    def end(self) -> str:
        """The rest of the text once the last token is in."""
        text, held = self._scan(self._decoder.end()), self._scanner.end()
        self.n_sent += len(held)
        return text + held

    def _scan(self, decoded: str) -> str:
        self.n_decoded += len(decoded)
        text = self._scanner.push(decoded)
        self.n_sent += len(text)
        return text


def _open_prefix(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
