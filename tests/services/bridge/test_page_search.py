"""Aim: while no place for pages is found, the search can say why: nobody there, or somebody who holds no pages.

Method: a control channel on loopback that answers `mem` as it is told; the pump only notes what it was offered.
"""

from __future__ import annotations

import asyncio
import json

from services.bridge.page_pump import PagesPlace
from services.bridge.page_search import NO_PAGES, PageSearch
from services.bridge.places import Place


class Wanting:
    """The pump's side of the search: it always wants a place."""

    wants_place = True

    def __init__(self) -> None:
        self.offered: list[PagesPlace] = []

    def offer(self, place: PagesPlace) -> None:
        self.offered.append(place)


async def _until(true) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come true in 10 s")


async def _as_it_is(_place: Place, port: int) -> int:
    return port


async def _meet() -> None:
    said = {"pa_port": 0, "avail_mb": 100}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(json.dumps(said).encode() + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    place = Place("127.0.0.1", 1, 1, "here")  # nobody listens on port 1
    pump = Wanting()
    search = PageSearch(pump, lambda: place, _as_it_is)
    looking = asyncio.create_task(search.run())
    try:
        await _until(lambda: "control channel does not answer" in search.trouble)
        place = Place("127.0.0.1", 1, port, "here")
        await _until(lambda: search.trouble == NO_PAGES)
        assert pump.offered == []
        said["pa_port"] = 50062
        await _until(lambda: pump.offered)
        assert search.trouble == "" and pump.offered[0].port == 50062
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        server.close()


def test_it_says_why_nothing_was_found() -> None:
    asyncio.run(_meet())
