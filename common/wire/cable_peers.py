"""Who may speak over the cable: this machine and link-local neighbours, nobody else. The protocol has no other lock.

Pure: an address as text, yes or no. Used by device.link_server, device.control, device.tail_fetch and
services.bridge.tail_server.
"""

from __future__ import annotations

import ipaddress


def may_connect(address: str) -> bool:
    """Loopback and link-local addresses may; everything else may not, and neither what is no address."""
    try:
        ip = ipaddress.ip_address(address.split("%", 1)[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_loopback or ip.is_link_local
