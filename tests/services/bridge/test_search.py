"""Aim: places are found where the system says they are, tried in order, and a forward ends with who started it.

Method: tables and trees as Linux writes them, in files; a responder of UDP questions on loopback; real child processes.
No cable and no phone takes part.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import ANY

import pytest

from common.config import BridgeSettings
from services.bridge import neighbours, usbmux_forward
from services.bridge.places import Place, Places
from services.bridge.search import NOT_CONFIGURED, Search, fixed_places

ARP = """IP address       HW type     Flags       HW address            Mask     Device
169.254.7.9      0x1         0x2         02:fc:00:00:00:05     *        usb0
169.254.7.10     0x1         0x0         00:00:00:00:00:00     *        usb0
192.168.1.1      0x1         0x2         02:fc:00:00:00:06     *        usb0
169.254.3.3      0x1         0x2         02:fc:00:00:00:07     *        wlan0
nonsense
"""


def test_neighbours_are_those_the_kernel_met_on_the_cable(tmp_path: Path) -> None:
    (tmp_path / "arp").write_text(ARP)
    assert neighbours.arp_neighbours({"usb0"}, tmp_path / "arp") == ["169.254.7.9"]
    assert neighbours.arp_neighbours({"usb0"}, tmp_path / "none") == []


def test_an_interface_on_a_usb_bus_is_told_from_another(tmp_path: Path) -> None:
    for name, device in (("enx02", "pci0000:00/usb1/1-2/1-2:1.0"), ("eth0", "pci0000:00/virtio2")):
        (tmp_path / "devices" / device).mkdir(parents=True)
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "device").symlink_to(tmp_path / "devices" / device)
    assert neighbours.on_usb("enx02", tmp_path / "net")
    assert not neighbours.on_usb("eth0", tmp_path / "net")
    assert not neighbours.on_usb("none", tmp_path / "net")


@pytest.mark.parametrize(
    ("address", "is_one"),
    [("169.254.0.1", True), ("169.253.0.1", False), ("::1", False), ("169.254.1.1.1", False), ("", False)],
)
def test_link_local_addresses(address: str, is_one: bool) -> None:
    assert neighbours.is_link_local(address) is is_one


def test_whoever_answers_the_question_is_a_neighbour() -> None:
    """The responder has another loopback address, as a neighbour has another address than we."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as responder:
        responder.bind(("127.0.0.2", 0))

        def respond() -> None:
            question, asker = responder.recvfrom(9000)
            assert question == neighbours.SERVICES_QUESTION
            for _ in range(2):
                responder.sendto(b"an answer", asker)

        thread = threading.Thread(target=respond)
        thread.start()
        asked = neighbours.answering_neighbours("127.0.0.1", wait_s=0.3, target=responder.getsockname())
        assert asyncio.run(asked) == ["127.0.0.2"]
        thread.join()


def test_nobody_answers_on_an_address_that_is_not_ours() -> None:
    assert asyncio.run(neighbours.answering_neighbours("169.254.250.250", wait_s=0.1)) == []


def test_fixed_places_and_what_is_said_without_one() -> None:
    place = fixed_places(BridgeSettings(worker_host="10.0.0.7")).current
    assert place == Place("10.0.0.7", 50060, 50061)
    assert fixed_places(BridgeSettings()).why == NOT_CONFIGURED
    assert fixed_places(BridgeSettings(worker_host="auto")).current is None


def test_places_are_tried_in_turn_and_the_one_met_stays_first() -> None:
    a, b, c = (Place(f"169.254.0.{n}", 1, 2, "usb") for n in (1, 2, 3))
    places = Places()
    assert not places.failed()
    assert places.offer([a, b], "")
    assert places.current == a
    assert places.failed() and places.current == b
    assert not places.failed(), "all were tried in this round"
    places.failed()
    places.met()
    assert places.current == b
    assert not places.offer([a, b], ""), "nothing new"
    assert places.offer([a, c, b], "") and places.current == b
    places.offer([], "none there")
    assert places.current is None and places.why == "none there"


def test_a_search_says_where_it_looked() -> None:
    search = Search(BridgeSettings(worker_host="auto"), lambda *_: None, lambda: True)
    places, why = asyncio.run(search.look())
    assert search.needed
    if not usbmux_forward.installed():
        assert "no neighbour on a USB-looking interface" in why or places
        assert "pip install 'outrigger[usbmux]'" in why
    assert not Search(BridgeSettings(worker_host="1.2.3.4"), lambda *_: None, lambda: True).needed


def test_ports_of_a_forward_are_checked() -> None:
    assert usbmux_forward.parse_ports(["1:2", "70:65535"]) == [(1, 2), (70, 65535)]
    for bad in ([], ["1"], ["0:5"], ["a:b"], ["1:70000"], ["1:2:3"]):
        with pytest.raises(ValueError):
            usbmux_forward.parse_ports(bad)
    command = usbmux_forward.forward_command(4, 5)
    assert command[1:] == ["-m", "pymobiledevice3", "usbmux", "forward", "4", "5"]


def test_forwarded_programs_are_started_again_and_end_with_us(tmp_path: Path) -> None:
    """A stand-in program that writes its process id; the real one is never needed to test who lives how long."""
    pids = tmp_path / "pids"
    program = f"import os,time; open({str(pids)!r},'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    script = (
        "import asyncio, sys, services.bridge.usbmux_forward as u; u.AGAIN_S = 0.05;"
        f"asyncio.run(u.forward([[sys.executable, '-c', {program!r}]], None))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3])
    first = _wait_for_pids(pids, 1)[0]
    os.kill(first, signal.SIGKILL)
    second = _wait_for_pids(pids, 2)[1]
    process.terminate()
    assert process.wait(10) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


PHONE = """
import asyncio, sys

async def main(local, remote):
    async def lead(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", remote)
        async def pass_on(source, sink):
            while data := await source.read(4096):
                sink.write(data)
            sink.close()
        await asyncio.gather(pass_on(reader, there[1]), pass_on(there[0], writer))
    await (await asyncio.start_server(lead, "127.0.0.1", local)).serve_forever()

assert sys.argv[1:3] == ["usbmux", "forward"]
asyncio.run(main(int(sys.argv[3]), int(sys.argv[4])))
"""
"""A stand-in for pymobiledevice3, to which this machine is the phone."""


def test_the_port_of_pages_is_reached_behind_usbmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever port the worker names; one that is reached directly stays as it is."""
    (tmp_path / "pymobiledevice3").mkdir()
    (tmp_path / "pymobiledevice3/__init__.py").touch()
    (tmp_path / "pymobiledevice3/__main__.py").write_text(PHONE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    search = Search(BridgeSettings(worker_host="usbmux"), lambda *_: None, lambda: True)

    async def reach() -> None:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"pages\n")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        pages_port = server.sockets[0].getsockname()[1]
        try:
            (place,), _ = await search.look()
            local = await search.reach(place, pages_port)
            assert local not in (pages_port, place.port, place.control_port)
            assert await _first_line(local) == b"pages\n"
            assert await search.reach(place, pages_port) == local, "the same way again"
            assert await search.look() == ([place], ANY), "and the link's own ports stay"
            assert await search.reach(Place("10.0.0.7", 1, 2), pages_port) == pages_port
        finally:
            await search.close()
            server.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", local)

    asyncio.run(reach())


async def _first_line(port: int) -> bytes:
    """From a port that somebody may listen on only in a moment."""
    for _ in range(1000):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
            continue
        line = await reader.readline()
        writer.close()
        return line
    raise AssertionError(f"nobody listens on port {port}")


def _wait_for_pids(path: Path, n: int) -> list[int]:
    for _ in range(1000):
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if len(lines) >= n:
            return [int(line) for line in lines]
        time.sleep(0.02)
    raise AssertionError(f"{n} programs were not started")
