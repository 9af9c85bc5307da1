"""Hands a worker its tail file: HTTP on an address of the cable, loopback and link-local clients only.

    GET /tail         the manifest, JSON (common.wire.tail_file)
    GET /tail/file    the file; Range requests are what makes it resumable

The manifest is made once, on a thread, when somebody first asks. Runs on the bridge's loop, or on that of
`outrigger split --serve`. Never gives away anything but this one file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from aiohttp import web

from common.errors import ModelError, ServiceError
from common.log import get_log
from common.wire.cable_peers import may_connect
from common.wire.tail_file import FILE_PATH, MANIFEST_PATH, Manifest, manifest_of

log = get_log()

SHUTDOWN_S = 0.5
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TailServer:
    """Serves `file` from `start` to `close`. `address` is where it listens; port 0 takes a free one."""

    def __init__(self, file: Path, host: str, port: int) -> None:
        self.file = file
        self.turned_away = 0
        self._host, self._port = host, port
        self._manifest: asyncio.Task[Manifest] | None = None
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> tuple[str, int]:
        assert self._runner is not None and self._runner.addresses, "start comes first"
        host, port = self._runner.addresses[0][:2]
        return host, port

    async def start(self) -> None:
        """Listen. Raises ModelError when there is no such file, ServiceError when the address is taken."""
        if not self.file.is_file():
            raise ModelError(
                f"there is no tail file {self.file} (bridge.tail_file); `outrigger split` writes one"
            )
        app = web.Application(middlewares=[self._admit])
        app.router.add_get(MANIFEST_PATH, self._get_manifest)
        app.router.add_get(FILE_PATH, self._get_file)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ServiceError(
                f"cannot serve the tail file on {self._host}:{self._port}: {error.strerror or error}; choose another "
                f"address or port (bridge.tail_host, bridge.tail_port)"
            ) from error
        log.info("tail file served", file=self.file.name, host=self.address[0], port=self.address[1])

    async def close(self) -> None:
        """Stop listening and drop clients."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        peer = request.remote or ""
        if not may_connect(peer):
            self.turned_away += 1
            log.warning("tail client turned away", peer=peer)
            raise web.HTTPForbidden(text="only loopback and link-local addresses may fetch the tail file\n")
        return await handler(request)

    async def _get_manifest(self, request: web.Request) -> web.Response:
        if self._manifest is None:
            self._manifest = asyncio.create_task(asyncio.to_thread(manifest_of, self.file))
        try:
            manifest = await asyncio.shield(self._manifest)
        except ModelError as error:
            self._manifest = None
            raise web.HTTPInternalServerError(text=f"{error}\n") from error
        log.info("tail manifest given", peer=request.remote, blocks=len(manifest.blocks))
        return web.Response(body=msgspec.json.encode(manifest), content_type="application/json")

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        log.info("tail file asked for", peer=request.remote, range=request.headers.get("Range", "all"))
        return web.FileResponse(self.file)
