"""Aim: a tail file arrives whole or not at all: checked, resumed after cuts, refused when foreign, cached when here.

Method: the bridge's real tail server and real files; a relay in between cuts connections and flips bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from common.errors import LinkDownError, ModelError, RemoteProtocolError, SettingError
from common.model.geometry import Geometry
from common.model.split import write_tail
from common.model.synthetic import write_synthetic
from common.wire.tail_file import BLOCK_BYTES, Manifest, manifest_of, parse_manifest, whole_digest
from device import tail_fetch
from device.tail_fetch import TailFetch, parse_source
from services.bridge.tail_server import TailServer
from tests.device.worker_process import CHECKOUT, worker_process


@pytest.fixture(scope="module")
def tail(tmp_path_factory) -> Path:
    """A tail of some blocks: wide rows, one layer."""
    folder = tmp_path_factory.mktemp("tail")
    geometry = Geometry(
        arch="llama", n_layer=2, n_embd=1024, n_ff=1024, n_head=8, n_head_kv=8, head_dim=128, n_vocab=8192
    )
    write_synthetic(geometry, folder / "whole.gguf")
    write_tail(folder / "whole.gguf", 1, folder / "tail.gguf")
    assert (folder / "tail.gguf").stat().st_size > 3 * BLOCK_BYTES
    return folder / "tail.gguf"


@contextmanager
def served(file: Path) -> Iterator[tuple[str, int]]:
    """A TailServer on a loop of its own; its address."""
    loop, server = asyncio.new_event_loop(), TailServer(file, "127.0.0.1", 0)
    loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.address
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def source(tail):
    with served(tail) as address:
        yield address


class Relay:
    """Passes bytes on to `target`; connection n is cut after budgets[n] bytes of answer, where one is given."""

    def __init__(self, target: tuple[str, int], budgets: dict[int, int], flip_at: int | None = None) -> None:
        self._target, self._budgets, self._flip_at = target, budgets, flip_at
        self.n_connections = 0
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = self._door.getsockname()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            self._pass(client, self.n_connections)
            self.n_connections += 1

    def _pass(self, client: socket.socket, number: int) -> None:
        with client, socket.create_connection(self._target) as server:
            server.sendall(client.recv(65536))
            passed = 0
            while data := bytearray(server.recv(65536)):
                left = self._budgets.get(number, 1 << 40) - passed
                if self._flip_at is not None and passed <= self._flip_at < passed + len(data):
                    data[self._flip_at - passed] ^= 4
                    self._flip_at = None
                try:
                    client.sendall(data[:left])
                except OSError:
                    return
                passed += len(data)
                if len(data) >= left:
                    return

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._thread.join()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(tail_fetch, "RETRY_S", 0.01)


def test_a_file_arrives_whole_and_is_fetched_once(tail, source, tmp_path) -> None:
    told = []
    fetch = TailFetch(source, tmp_path / "tails", lambda done, total: told.append((done, total)))
    path = fetch.run()
    assert path.read_bytes() == tail.read_bytes()
    assert fetch.attempts == 1
    assert told == sorted(told) and told[-1] == (tail.stat().st_size,) * 2
    again = TailFetch(source, tmp_path / "tails")
    assert again.run() == path
    assert again.attempts == 0, "nothing was missing"
    assert [each.name for each in (tmp_path / "tails").iterdir()] == [path.name]


def test_cuts_are_survived_and_only_what_is_missing_is_fetched(tail, source, tmp_path) -> None:
    relay = Relay(source, {1: BLOCK_BYTES // 2, 2: BLOCK_BYTES + 100_000, 3: 0})
    try:
        fetch = TailFetch(relay.address, tmp_path)
        assert fetch.run().read_bytes() == tail.read_bytes()
        assert fetch.attempts == 4
    finally:
        relay.close()


def test_what_was_fetched_before_a_stop_is_kept_and_checked_again(tail, source, tmp_path) -> None:
    done = []
    with pytest.raises(LinkDownError, match="what is here is kept"):
        TailFetch(source, tmp_path, lambda at, _total: done.append(at), lambda: len(done) >= 2).run()
    (part,) = tmp_path.iterdir()
    assert part.stat().st_size == 2 * BLOCK_BYTES
    with part.open("r+b") as file:  # the second block rots meanwhile
        file.seek(BLOCK_BYTES + 5)
        file.write(b"rot")
    relay = Relay(source, {})
    try:
        assert TailFetch(relay.address, tmp_path).run().read_bytes() == tail.read_bytes()
    finally:
        relay.close()


def test_a_damaged_block_is_fetched_again(tail, source, tmp_path) -> None:
    relay = Relay(source, {}, flip_at=None)
    relay._flip_at = BLOCK_BYTES + 1000
    try:
        fetch = TailFetch(relay.address, tmp_path)
        assert fetch.run().read_bytes() == tail.read_bytes()
        assert fetch.attempts == 2
    finally:
        relay.close()


def test_a_file_that_changed_meanwhile_is_refused(tail, tmp_path) -> None:
    changing = tmp_path / "tail.gguf"
    changing.write_bytes(tail.read_bytes())
    with served(changing) as source:
        fetch = TailFetch(source, tmp_path / "tails")
        manifest = fetch._manifest()
        changing.write_bytes(b"\0" * (tail.stat().st_size + 1))
        (tmp_path / "tails").mkdir()
        with pytest.raises(RemoteProtocolError, match="its tail file is another one"):
            fetch._fetch(tmp_path / "tails" / "x.part", manifest, 0)
        assert fetch.attempts == tail_fetch.ATTEMPTS


def test_what_is_no_model_is_refused_and_removed(tmp_path) -> None:
    (tmp_path / "notes.gguf").write_bytes(os.urandom(1 << 20))
    refused = pytest.raises(ModelError, match=r"notes.gguf is not a file this worker can run")
    with served(tmp_path / "notes.gguf") as source, refused:
        TailFetch(source, tmp_path / "tails").run()
    assert list((tmp_path / "tails").iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_fetched(tmp_path) -> None:
    blocks = ("0" * 32,) * (1 << 14)
    n_bytes = len(blocks) << 26
    huge = Manifest("huge.gguf", n_bytes, 64 << 20, blocks, whole_digest(n_bytes, blocks))
    body = msgspec.json.encode(huge)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            client, _ = door.accept()
            with client:
                client.recv(65536)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ModelError, match=r"needs 1048640 MiB more .* MiB free; free some space"):
            TailFetch(door.getsockname(), tmp_path).run()
        thread.join()


def test_nobody_there_is_told_with_the_remedy(tmp_path) -> None:
    with pytest.raises(LinkDownError, match="does a host run there, with a tail file"):
        TailFetch(("127.0.0.1", 1), tmp_path).run()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_bytes": 0}, "0 bytes in blocks"),
        ({"block_bytes": 5}, "in blocks of 5"),
        ({"blocks": ()}, "0 blocks, expected 1"),
        ({"name": "../evil"}, "its name is '../evil'"),
        ({"blocks": ("G" * 32,)}, "not hexadecimal"),
        ({"whole": "0" * 64}, "the hash of all blocks is wrong"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path, changes, says) -> None:
    (tmp_path / "a.gguf").write_bytes(b"abc")
    good = manifest_of(tmp_path / "a.gguf")
    assert parse_manifest(msgspec.json.encode(good)) == good
    with pytest.raises(RemoteProtocolError) as caught:
        parse_manifest(msgspec.json.encode(msgspec.structs.replace(good, **changes)))
    assert says in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{}", b'{"name": 5}', b"\xff", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="is not understood"):
        parse_manifest(text)


def test_sources_are_of_this_machine_or_of_a_cable() -> None:
    assert parse_source("127.0.0.1") == ("127.0.0.1", 50063)
    assert parse_source("169.254.7.7:99") == ("169.254.7.7", 99)
    for bad, says in (
        ("8.8.8.8", "neither loopback nor link-local"),
        ("127.0.0.1:0", "no port"),
        ("a b", "cannot find"),
    ):
        with pytest.raises(SettingError, match=says):
            parse_source(bad)


def test_a_worker_fetches_loads_and_serves(tail, source, tmp_path) -> None:
    flags = ["--from", f"127.0.0.1:{source[1]}"]
    with worker_process(None, *flags, folder=tmp_path) as worker:
        assert any(line.startswith("tail file: 100% of") for line in worker.said)
        assert "layers 1-1 of llama" in worker.ready_line


def test_split_streams_to_a_pipe_what_it_writes_to_a_file(tail) -> None:
    whole = tail.with_name("whole.gguf")
    command = [sys.executable, "-m", "services.cli.main", "split", str(whole), "-", "-L", "1"]
    piped = subprocess.run(command, cwd=CHECKOUT, capture_output=True, check=True)
    assert piped.stdout == tail.read_bytes()
