"""Who is at the other end of a USB cable: link-local IPv4 neighbours on interfaces that look like one.

Two sources, no command is run: the kernel's own table (/proc/net/arp, Linux), and the answers to one question over
multicast DNS, which phones, Macs and most Linux desktops answer with their address whatever is asked. Which interfaces
count: those with an address of 169.254.0.0/16, and on Linux also those whose device hangs on a USB bus.

On macOS only the second source exists. It is written from documentation (RFC 6762, 5.1: a question from another port
than 5353 is answered to that port) and was never run there, nor with a phone.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

import psutil

LINK_LOCAL = ipaddress.ip_network("169.254.0.0/16")
ARP_TABLE = Path("/proc/net/arp")
NET_CLASS = Path("/sys/class/net")
ARP_COMPLETE = 0x2
MDNS = ("224.0.0.251", 5353)
SERVICES_QUESTION = struct.pack(">HHHHHH", 0, 0, 1, 0, 0, 0) + (
    b"\x09_services\x07_dns-sd\x04_udp\x05local\x00" + struct.pack(">HH", 12, 0x8001)
)
"""PTR of _services._dns-sd._udp.local, class IN, an answer to us alone asked for: "which services are there?"."""
MDNS_WAIT_S = 0.6


def cable_interfaces() -> dict[str, list[str]]:
    """Interfaces that may be a cable: name -> our own IPv4 addresses on it."""
    stats = psutil.net_if_stats()
    found = {}
    for name, addresses in psutil.net_if_addrs().items():
        ours = [each.address for each in addresses if each.family == socket.AF_INET]
        up = name in stats and stats[name].isup
        if up and ours and (any(map(is_link_local, ours)) or on_usb(name)):
            found[name] = ours
    return found


def is_link_local(address: str) -> bool:
    """Whether an IPv4 address is of 169.254.0.0/16."""
    try:
        return ipaddress.IPv4Address(address) in LINK_LOCAL
    except ValueError:
        return False


def on_usb(interface: str, net_class: Path = NET_CLASS) -> bool:
    """Whether a network interface's device hangs on a USB bus (Linux; elsewhere False)."""
    device = net_class / interface / "device"
    return device.exists() and any(part.startswith("usb") for part in device.resolve().parts)


def arp_neighbours(interfaces: set[str], table: Path = ARP_TABLE) -> list[str]:
    """Link-local addresses the kernel knows on these interfaces."""
    if not table.exists():
        return []
    found = []
    for line in table.read_text().splitlines()[1:]:
        columns = line.split()
        if len(columns) != 6 or columns[5] not in interfaces:
            continue
        with suppress(ValueError):
            if int(columns[2], 16) & ARP_COMPLETE and is_link_local(columns[0]):
                found.append(columns[0])
    return found


async def answering_neighbours(
    own_address: str, *, wait_s: float = MDNS_WAIT_S, target: tuple[str, int] = MDNS
) -> list[str]:
    """Link-local addresses that answer one multicast DNS question on the interface with own_address."""
    loop = asyncio.get_running_loop()
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        try:
            sock.bind((own_address, 0))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own_address))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
            sock.sendto(SERVICES_QUESTION, target)
        except OSError:
            return []  # the cable was pulled, or the interface takes no multicast
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(wait_s):
                while True:
                    _, (address, _port) = await loop.sock_recvfrom(sock, 9000)
                    if address != own_address and address not in found:
                        found.append(address)
    return found


async def neighbours() -> tuple[list[str], list[str]]:
    """(addresses at the other end of cables, interfaces looked at)."""
    interfaces = cable_interfaces()
    found = arp_neighbours(set(interfaces))
    questions = [answering_neighbours(own) for addresses in interfaces.values() for own in addresses]
    for answers in await asyncio.gather(*questions):
        found += [each for each in answers if is_link_local(each) and each not in found]
    ours = {own for addresses in interfaces.values() for own in addresses}
    return [each for each in found if each not in ours], sorted(interfaces)
