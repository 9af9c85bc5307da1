"""The language of fault scripts: one fault a line, or several with ";" between them. Pure: reads, checks, prints.

    cut in chunk 3                    the connection breaks when half of the third chunk's bytes have come
    freeze 8 during range             nothing moves for 8 s once a STATE_RANGE came whole
    flip answering chunk 2            one bit of the answer to the second chunk is another one
    slow 4 for 10 after chunk 1       computing takes four times as long for 10 s
    restart 1 at 2.5s                 connections refused for 1 s, then another boot id and an empty mirror

A fault is KIND [VALUE] [for SECONDS] MOMENT; docs/emulator.md has the table, and a test compares it with these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from common.errors import SettingError

SECONDS_MAX = 3600.0
FRAME_NUMBER_MAX = 1_000_000


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what its value means (None: it takes none), its bounds, and whether it may last."""

    text: str
    value: str | None = None
    most: float = SECONDS_MAX
    least: float = 0.0
    lasts: bool = False


KINDS = {
    "cut": Kind("the connection breaks (TCP reset)"),
    "freeze": Kind("nothing is read, computed or sent", "seconds"),
    "flip": Kind("one bit of the frame, or of its answer, is another one"),
    "slow": Kind("computing takes so many times as long; heat 2 is told", "times", 1000.0, 1.0, lasts=True),
    "memory-low": Kind("mem and watch tell that memory is low", lasts=True),
    "out-of-memory": Kind("the next chunk, or piece of a page, is refused for want of memory"),
    "suspend": Kind("the state suspending is told, then nothing moves, then all goes on", "seconds"),
    "restart": Kind("connections are reset, then another boot id and an empty mirror", "seconds"),
    "wrong-version": Kind("the next greeting meets a worker of another version", lasts=True),
    "foreign-model": Kind("the next greeting meets a worker with another model", lasts=True),
}
MOMENTS = {
    "before": "its first bytes came",
    "in": "half of its bytes came",
    "during": "it came whole, and its work begins",
    "answering": "half of its answer was sent",
    "after": "its answer was sent",
}
FRAMES = {
    "chunk": ("CHUNK", "CHUNK2"),
    "sync": ("SYNC", "SYNC2"),
    "range": ("STATE_RANGE", "STATE_RANGE2", "STATE"),
    "trim": ("TRIM", "TRIM2"),
    "snapshot": ("SNAPSHOT",),
    "reset": ("RESET",),
    "hello": ("HELLO", "HELLO3"),
    "ping": ("PING",),
}
"""Word of a script -> names of the residual channel's frames in docs/protocol.md."""
PAGE_FRAMES = {
    "query": ("ATTN", "ATTN_BIG", "ATTN2"),
    "append": ("APPEND", "APPEND2"),
    "truncate": ("TRUNCATE", "TRUNCATE2"),
    "fetch": ("FETCH", "FETCH2"),
    "config": ("CONFIG", "CONFIG2"),
    "greet": ("HELLO", "HELLO3"),
    "probe": ("PING",),
    "stats": ("STATS",),
}
"""The same of the attention channel."""
ALL_FRAMES = FRAMES | PAGE_FRAMES
assert len(ALL_FRAMES) == len(FRAMES) + len(PAGE_FRAMES), "a word names frames of one channel"
FLIP_MOMENTS = ("in", "answering")
NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)"
_LINE = re.compile(
    rf"(?P<kind>[a-z-]+)(?: (?P<value>{NUMBER}))?(?: for (?P<lasts>{NUMBER})s?)?"
    rf" (?:(?P<now>now)|at (?P<at>{NUMBER})s?|(?P<moment>[a-z]+) (?P<frame>[a-z]+)(?: (?P<number>\d+))?)"
)


@dataclass(frozen=True)
class Fault:
    """One fault. `moment` is a key of MOMENTS with `frame` and `number`, or "at" with `at_s` after it was armed."""

    kind: str
    value: float | None
    lasts_s: float | None
    moment: str
    frame: str = ""
    number: int = 1
    at_s: float = 0.0

    def __str__(self) -> str:
        value = f" {self.value:g}" if self.value is not None else ""
        lasts = f" for {self.lasts_s:g}" if self.lasts_s is not None else ""
        when = f"at {self.at_s:g}s" if self.moment == "at" else f"{self.moment} {self.frame} {self.number}"
        return f"{self.kind}{value}{lasts} {when}"


def read_script(setting: str) -> list[Fault]:
    """The faults of a setting: a script, or "@FILE" that holds one. Raises SettingError."""
    if not setting.startswith("@"):
        return parse_script(setting)
    try:
        return parse_script(Path(setting[1:]).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"worker.faults: cannot read the script {setting[1:]}: {error}") from error


def parse_script(text: str) -> list[Fault]:
    """The faults of a script, in its order. Raises SettingError naming the line and what is allowed."""
    faults = []
    for number, line in enumerate(re.split(r"[;\n]", text), 1):
        words = " ".join(line.partition("#")[0].split())
        if words:
            faults.append(_fault(words, f"fault {number}, {words[:80]!r}"))
    return faults


def _fault(words: str, where: str) -> Fault:
    found = _LINE.fullmatch(words)
    name = words.split(" ")[0]
    if name not in KINDS:
        raise SettingError(f"{where}: there is no {name!r}; there are {', '.join(KINDS)}")
    if found is None:
        raise SettingError(
            f"{where}: a fault is KIND [VALUE] [for SECONDS], then now, at SECONDS, or "
            f"{'|'.join(MOMENTS)} {'|'.join(ALL_FRAMES)} [NUMBER]"
        )
    value, lasts = (float(found[key]) if found[key] else None for key in ("value", "lasts"))
    _check_values(name, value, lasts, where)
    if found["moment"] is None:
        if name == "flip":
            raise SettingError(f"{where}: flip needs a frame: {' or '.join(FLIP_MOMENTS)} FRAME [NUMBER]")
        return Fault(name, value, lasts, "at", at_s=_bounded(float(found["at"] or 0), 0, SECONDS_MAX, where))
    moment, frame, number = found["moment"], found["frame"], int(found["number"] or 1)
    if moment not in MOMENTS or frame not in ALL_FRAMES:
        wrong, allowed = (moment, MOMENTS) if moment not in MOMENTS else (frame, ALL_FRAMES)
        raise SettingError(f"{where}: {wrong!r} is not one of {', '.join(allowed)}")
    if name == "flip" and moment not in FLIP_MOMENTS:
        raise SettingError(f"{where}: a bit is flipped {' or '.join(FLIP_MOMENTS)} a frame, not {moment} it")
    if frame == "ping" and (name == "flip" or moment == "during"):
        raise SettingError(f"{where}: a ping has no hash and is not computed; nobody would notice")
    return Fault(name, value, lasts, moment, frame, int(_bounded(number, 1, FRAME_NUMBER_MAX, where)))


def _check_values(name: str, value: float | None, lasts: float | None, where: str) -> None:
    kind = KINDS[name]
    if (value is None) != (kind.value is None):
        wanted = f"needs its {kind.value}, as in '{name} 4'" if kind.value else "takes no number"
        raise SettingError(f"{where}: {name} {wanted}")
    if value is not None:
        _bounded(value, kind.least, kind.most, where)
    if lasts is not None:
        if not kind.lasts:
            raise SettingError(f"{where}: {name} does not last; leave 'for' out")
        _bounded(lasts, 0, SECONDS_MAX, where)


def _bounded(value: float, least: float, most: float, where: str) -> float:
    if not least <= value <= most:
        raise SettingError(f"{where}: {value:g} is out of range, allowed {least:g} to {most:g}")
    return value
