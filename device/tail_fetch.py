"""Fetches this worker's tail file from the bridge: checked block by block, resumed after a cut, placed when whole.

Files lie in a folder of tails under names that hold their hash, so a file that is there is fetched once. What was
fetched before a cut is a `.part` beside it, whose blocks are checked again before more is added. The bridge must be at
a loopback or link-local address. Used by device.worker before it loads; knows nothing of models but that the file must
be one.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from common.errors import LinkDownError, ModelError, OutriggerError, RemoteProtocolError, SettingError
from common.limits import MIB
from common.log import get_log
from common.model.spec import ModelSpec
from common.wire.cable_peers import may_connect
from common.wire.tail_file import FILE_PATH, MANIFEST_PATH, Manifest, Progress, parse_manifest

log = get_log()

DEFAULT_PORT = 50_063
DISK_RESERVE_BYTES = 64 * MIB
MANIFEST_BYTES_MAX = 32 * MIB
MANIFEST_S_MAX = 600.0
"""The bridge may have to read its whole file first."""
SILENCE_S_MAX = 15.0
ATTEMPTS = 8
"""Connections in a row that brought no new block before it is given up."""
RETRY_S = 0.5
CUT = (OSError, http.client.HTTPException)


def parse_source(text: str) -> tuple[str, int]:
    """HOST or HOST:PORT. Raises SettingError unless it is an address of loopback or of a cable."""
    host, _, port = text.partition(":") if text.count(":") <= 1 else (text, "", "")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65_536):
        raise SettingError(f"worker.source: {text!r} has no port from 1 to 65535 after its colon")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SettingError(f"worker.source: cannot find {host!r}: {error.strerror}") from error
    address = str(found[0][4][0])
    if not may_connect(address):
        raise SettingError(
            f"worker.source: {host} is {address}, neither loopback nor link-local; a tail file comes over a cable"
        )
    return address, int(port or DEFAULT_PORT)


class TailFetch:
    """One fetch into `folder`. `stopped` is asked between blocks."""

    def __init__(
        self,
        source: tuple[str, int],
        folder: Path,
        progress: Progress | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.attempts = 0
        """Connections made for the file."""
        self._source, self._folder, self._stopped = source, folder, stopped
        self._progress = progress or (lambda _done, _total: None)

    def run(self) -> Path:
        """The path of the whole, checked file. Raises LinkDownError, RemoteProtocolError, ModelError."""
        manifest = self._manifest()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{manifest.name.removesuffix('.gguf')}-{manifest.whole[:16]}.gguf"
        part = path.with_suffix(".part")
        if path.exists():
            os.replace(path, part)  # checked like a part: its blocks may have been damaged since
        n_done = self._checked_blocks(part, manifest)
        self._check_disk(manifest, n_done)
        self._fetch(part, manifest, n_done)
        _check_model(part, manifest)
        os.replace(part, path)
        log.info("tail file here", file=path.name, mb=manifest.n_bytes // MIB, fetched_from_block=n_done)
        return path

    # --- steps

    def _manifest(self) -> Manifest:
        try:
            with _asked(self._source, MANIFEST_PATH, MANIFEST_S_MAX, {}) as answer:
                text = answer.read(MANIFEST_BYTES_MAX)
        except CUT as error:
            raise LinkDownError(
                f"cannot get the tail's manifest from {self._where}: {error}; does a host run there, with a tail file "
                f"(bridge.tail_file)?"
            ) from error
        if answer.status != 200:
            words = text[:200].decode(errors="replace").strip()
            raise LinkDownError(f"{self._where} does not give its tail file: {answer.status} {words}")
        return parse_manifest(text)

    @property
    def _where(self) -> str:
        return f"{self._source[0]}:{self._source[1]}"

    def _checked_blocks(self, part: Path, manifest: Manifest) -> int:
        """How many of the first blocks are here already and right; the rest of the part is cut off."""
        if not part.exists():
            return 0
        n_good = 0
        with part.open("r+b") as file:
            for block in range(len(manifest.blocks)):
                first, stop = manifest.span(block)
                data = file.read(stop - first)
                if len(data) < stop - first or not manifest.holds(block, data):
                    break
                n_good += 1
                self._tell(stop, manifest)
            file.truncate(min(manifest.n_bytes, n_good * manifest.block_bytes))
        return n_good

    def _check_disk(self, manifest: Manifest, n_done: int) -> None:
        needed = manifest.n_bytes - min(manifest.n_bytes, n_done * manifest.block_bytes) + DISK_RESERVE_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise ModelError(
                f"the tail file needs {needed / MIB:.0f} MiB more (with a reserve of "
                f"{DISK_RESERVE_BYTES / MIB:.0f} MiB) and {self._folder} has {free / MIB:.0f} MiB free; free some "
                f"space or name another folder (run.data_dir)"
            )

    def _fetch(self, part: Path, manifest: Manifest, n_done: int) -> None:
        """Add the blocks that are missing, over as many connections as it takes."""
        idle = 0
        while n_done < len(manifest.blocks):
            before, self.attempts = n_done, self.attempts + 1
            error: Exception
            try:
                for data in self._blocks(manifest, n_done):
                    with part.open("ab") as file:
                        file.write(data)
                    n_done += 1
                    self._tell(manifest.span(n_done - 1)[1], manifest)
                continue
            except CUT as cut:
                error = LinkDownError(f"the tail file of {self._where} stopped at block {n_done}: {cut}")
            except RemoteProtocolError as wrong:
                error = wrong
            idle = 0 if n_done > before else idle + 1
            if idle >= ATTEMPTS:
                raise error
            log.warning("tail file interrupted", block=n_done, of=len(manifest.blocks), error=str(error))
            time.sleep(RETRY_S)
        with part.open("rb") as file:
            os.fsync(file.fileno())

    def _blocks(self, manifest: Manifest, first: int) -> Iterator[bytes]:
        """The blocks from `first` on, each checked. Raises RemoteProtocolError on a wrong one, CUT errors."""
        begin = manifest.span(first)[0]
        with _asked(self._source, FILE_PATH, SILENCE_S_MAX, {"Range": f"bytes={begin}-"}) as answer:
            if answer.status != 206 or answer.length != manifest.n_bytes - begin:
                raise RemoteProtocolError(
                    f"{self._where} answers {answer.status} with {answer.length} bytes: its tail file is another one"
                )
            for block in range(first, len(manifest.blocks)):
                if self._stopped():
                    raise LinkDownError("stopped while the tail file was fetched; what is here is kept")
                begin, stop = manifest.span(block)
                data = answer.read(stop - begin)
                if len(data) < stop - begin:
                    raise http.client.IncompleteRead(data)
                if not manifest.holds(block, data):
                    raise RemoteProtocolError(
                        f"block {block} of the tail file from {self._where} has a wrong hash"
                    )
                yield data

    def _tell(self, done: int, manifest: Manifest) -> None:
        if self._stopped():
            raise LinkDownError("stopped while the tail file was fetched; what is here is kept")
        self._progress(done, manifest.n_bytes)


@contextmanager
def _asked(
    source: tuple[str, int], path: str, silence_s_max: float, headers: dict[str, str]
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET on a connection of its own. Both are closed: an answer keeps its connection's socket."""
    with closing(http.client.HTTPConnection(*source, timeout=silence_s_max)) as connection:
        connection.request("GET", path, headers={"Connection": "close", **headers})
        with closing(connection.getresponse()) as answer:
            yield answer


def _check_model(part: Path, manifest: Manifest) -> None:
    """Refuse what arrived whole and is no model of ours. The part is removed: fetching it again would not help."""
    try:
        ModelSpec.read(part)
    except OutriggerError as error:
        part.unlink(missing_ok=True)
        raise ModelError(
            f"what came as {manifest.name} is not a file this worker can run: {error}"
        ) from error
