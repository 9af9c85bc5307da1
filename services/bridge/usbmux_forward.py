"""Ports of a phone on this machine's loopback, by usbmux: `python -m services.bridge.usbmux_forward LOCAL:REMOTE ...`

pymobiledevice3 does the work, as a program of its own: it is under the GPL and an optional extra, so nothing of ours
imports it; here its command line is run, one process a port, started again when it ends (the phone was unplugged).
This process ends them when it is told to stop or when its parent is gone. Started by services.bridge.search.

Written from the program's documentation; no phone was at hand to run it with.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
from contextlib import suppress

from services.runtime.guard import PARENT_LOOK_S, parent_pid_in

MODULE = "pymobiledevice3"
AGAIN_S = 2.0
STOP_S = 1.0


def installed() -> bool:
    """Whether the extra is there. Finds it, imports nothing of it."""
    return importlib.util.find_spec(MODULE) is not None


def forward_command(local_port: int, remote_port: int) -> list[str]:
    """The command line that forwards one port of the only phone there is."""
    return [sys.executable, "-m", MODULE, "usbmux", "forward", str(local_port), str(remote_port)]


def parse_ports(arguments: list[str]) -> list[tuple[int, int]]:
    """(local, remote) of each LOCAL:REMOTE. Raises ValueError."""
    pairs = [argument.split(":") for argument in arguments]
    ports = [(int(local), int(remote)) for local, remote in pairs]
    if not ports or not all(0 < port < 65_536 for pair in ports for port in pair):
        raise ValueError("name at least one pair of ports, each from 1 to 65535")
    return ports


async def end_child(child: asyncio.subprocess.Process, within_s: float = STOP_S) -> None:
    """Ask a process to end, and kill it when it does not."""
    if child.returncode is not None:
        return
    child.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await child.wait()
    if child.returncode is None:
        child.kill()


async def keep_running(command: list[str]) -> None:
    """Run a command again and again until this task is cancelled; then end it."""
    while True:
        child = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            await child.wait()
            await asyncio.sleep(AGAIN_S)
        finally:
            await end_child(child)


async def forward(commands: list[list[str]], parent_pid: int | None) -> None:
    """Keep all commands running until SIGTERM, SIGINT or the end of the parent."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    tasks = [asyncio.create_task(keep_running(command)) for command in commands]
    while not stopping.is_set() and (parent_pid is None or os.getppid() == parent_pid):
        with suppress(TimeoutError):
            async with asyncio.timeout(PARENT_LOOK_S):
                await stopping.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main(arguments: list[str]) -> int:
    """The process."""
    try:
        ports = parse_ports(arguments)
    except ValueError as error:
        print(f"usbmux_forward: {error}", file=sys.stderr)
        return 2
    if not installed():
        print("usbmux_forward: needs the extra: pip install 'outrigger[usbmux]'", file=sys.stderr)
        return 1
    asyncio.run(forward([forward_command(*pair) for pair in ports], parent_pid_in(os.environ)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
