"""Aim: docs/zeromq.md and the code say the same of every message, bound and code.

Method: the document's tables are read and compared with the message types, the limits and the settings. Its examples
are run by tests/journey/test_zeromq.py and tests/system.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from common import limits
from common.config import GatewaySettings, ZmqSettings
from common.wire import public as p


@pytest.fixture(scope="module")
def document(checkout: Path) -> str:
    return (checkout / "docs" / "zeromq.md").read_text(encoding="utf-8")


def rows(document: str, name: str) -> list[list[str]]:
    table = document.split(f"<!-- contract: {name} -->\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def keys_of(kind: type[msgspec.Struct], *, skip: tuple[str, ...] = (), defaults: bool) -> str:
    """The keys of a message as the document writes them."""
    words = []
    for field in msgspec.structs.fields(kind):
        if field.name in skip:
            continue
        given = field.default is not msgspec.NODEFAULT
        default = msgspec.json.encode(field.default).decode() if given else ""
        words.append(f"`{field.name}`" + (f" = {default}" if defaults and given else ""))
    return ", ".join(words)


@pytest.mark.parametrize(
    ("table", "union", "skip"),
    [("asks", p.AnyAsk, ()), ("answers", p.AnyAnswer, ()), ("events", p.AnyEvent, ("seq", "at_s"))],
)
def test_the_messages_are_those_of_the_code(document, table, union, skip):
    written = [row[:2] for row in rows(document, table)]
    assert written == [
        [f"`{kind.__struct_config__.tag}`", keys_of(kind, skip=skip, defaults=table == "asks")]
        for kind in union.__args__
    ]


def test_the_frames_are_those_of_the_code(document):
    first, second = rows(document, "frames")
    assert f"`{p.VERSION_FRAME.decode()}`" in first[1]
    assert f"at most {limits.PUBLIC_BYTES_MAX // limits.MIB} MiB" in second[1]


def test_the_bounds_are_those_of_the_code(document):
    numbers = [int(re.match(r"\d+", row[1])[0]) for row in rows(document, "bounds")]
    assert numbers == [
        limits.PUBLIC_BUFFER_TOKENS_MAX,
        ZmqSettings().stall_s,
        limits.PUBLIC_HWM_MESSAGES,
        limits.PUBLIC_REPLIES_MAX,
        limits.PUBLIC_REQUESTS_MAX,
        GatewaySettings().requests_waiting_max,
        limits.PUBLIC_PENDING_BYTES_MAX,
        limits.PUBLIC_CLIENTS_MAX,
        limits.PUBLIC_BYTES_MAX,
        limits.EVENTS_HWM_MESSAGES,
    ]
    assert f"`lease_s` ({ZmqSettings().lease_s:.0f} s" in document


def test_the_ports_are_those_of_the_settings(document):
    assert f"tcp://127.0.0.1:{ZmqSettings().port}" in document
    assert f"tcp://127.0.0.1:{ZmqSettings().events_port}" in document


def test_the_codes_are_those_of_the_door(document, checkout):
    source = "".join(
        (checkout / "services" / "gateway" / name).read_text(encoding="utf-8")
        for name in ("public_door.py", "public_reading.py")
    )
    raised = set(re.findall(r'PublicRefusal\(\s*(\d+), "(\w+)"', source)) - {("503", "service_unavailable")}
    assert {(row[1], row[0].strip("`")) for row in rows(document, "codes")} == raised
