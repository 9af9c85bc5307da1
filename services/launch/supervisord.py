"""`python -m services.launch.supervisord`: the supervision library's own process, which leaves with its parent.

The library has no parent watch. An interval timer looks at the parent twice a second and, once it is gone, sends this
process the SIGTERM that makes it stop everything it runs. A timer, because this process forks: a thread would be
copied half. Our processes learn here whose children they are, so that they leave when this process is killed. A lock
makes it wait until one that an earlier launch left behind has stopped its processes. How each process ended is written
down (ends.py), because the library forgets by which signal.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path

from supervisor.options import ServerOptions
from supervisor.supervisord import go

from common.log import Lossy
from services.launch.ends import End, append_end
from services.runtime.guard import PARENT_LOOK_S, PARENT_VARIABLE, parent_pid_in


class Options(ServerOptions):
    """The library's options, which do its system calls, too: here the one that learns of a child's end."""

    run_dir: Path

    def waitpid(self) -> tuple[int | None, int | None]:
        """As the library's; and the end is written down before the library acts on it."""
        pid, status = super().waitpid()
        if pid and (process := self.pidhistory.get(pid)) is not None:
            append_end(self.run_dir, End.of(process.config.name, pid, status))
        return pid, status


def run(arguments: list[str]) -> None:
    """Supervise until told to stop, or until the parent named in the environment is gone."""
    sys.stderr = Lossy(sys.stderr)  # the library tells there of log lines it cannot write
    configuration = Path(arguments[arguments.index("-c") + 1])
    _wait_for_predecessor(configuration.with_suffix(".lock"))
    parent_pid = parent_pid_in(os.environ)
    os.environ[PARENT_VARIABLE] = str(os.getpid())

    def look(*_: object) -> None:
        if parent_pid is not None and os.getppid() != parent_pid:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, PARENT_LOOK_S, PARENT_LOOK_S)
    options = Options()
    options.run_dir = configuration.parent
    options.realize(arguments)
    options.first, options.test = True, False
    go(options)
    options.close_httpservers()
    options.close_logger()


def _wait_for_predecessor(path: Path) -> None:
    """Hold the lock of this run directory until the process ends; it stays open on purpose."""
    fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)


if __name__ == "__main__":
    run(sys.argv[1:])
