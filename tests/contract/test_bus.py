"""Aim: docs/bus.md and the code say the same of the bus.

Method: the document's tables are read and compared with the route table, the limits and the header's struct.
"""

from __future__ import annotations

import re

import pytest

from common.limits import MIB
from common.wire.codec import BUS_VERSION, HEADER_BYTES, MAGIC
from common.wire.routes import ROUTES


@pytest.fixture(scope="module")
def document(checkout) -> str:
    return (checkout / "docs" / "bus.md").read_text()


def rows(document: str, name: str) -> list[list[str]]:
    table = document.split(f"<!-- contract: {name} -->\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_routes_are_those_of_the_code(document):
    written = [row[:6] for row in rows(document, "routes")]
    assert written == [
        [
            str(route.id),
            route.name,
            route.asker,
            route.owner,
            str(route.hwm),
            f"{route.frame_bytes_max // MIB} MiB",
        ]
        for route in ROUTES.values()
    ]


def test_the_header_is_that_of_the_codec(document):
    frame, holds = rows(document, "header")[0]
    assert frame == f"header, {HEADER_BYTES} bytes"
    assert f'magic "{MAGIC.decode()}", u16 version {BUS_VERSION},' in holds
    widths = [int(bits) // 8 for bits in re.findall(r"u(\d+)", holds)]
    assert len(MAGIC) + sum(widths) == HEADER_BYTES
