"""A bundle's files in the container of an app on a phone at the cable, by pymobiledevice3's command line.

That program is under the GPL and an optional extra (`pip install "outrigger[usbmux]"`): nothing of it is imported, it
runs in a process of its own, one a file. Every file is pulled back and hashed after it was pushed; a file that is there
and right is not pushed again. Written from the program's own help; **never tried on a device**. Called by
services.cli.bundle.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from common.errors import PackageError, ServiceError, SettingError
from device.coreml.convert.delivery import Delivered, Files
from device.coreml.convert.manifest import wrong_files
from services.bridge.usbmux_forward import MODULE, installed

COMMAND = (sys.executable, "-m", MODULE)
ROOT = PurePosixPath("/Documents")
SECONDS_MAX = 1800.0
NEEDS = "a phone is reached by pymobiledevice3 (GPL, a program of its own): pip install 'outrigger[usbmux]'"


class PhoneFiles:
    """The Documents folder of one app. `program` is how the program is started."""

    def __init__(self, app: str, program: Sequence[str] = COMMAND) -> None:
        if program is COMMAND and not installed():
            raise SettingError(NEEDS)
        self.app, self.program = app, tuple(program)

    def push(self, bundle: Path, name: str, files: Files, told: Callable[[str, int], None]) -> Delivered:
        """Bring `files` of a bundle to the folder `name`. Raises PackageError, ServiceError."""
        wrong = self.wrong(name, files)
        if wrong:
            self._make_folders(name, files)
        for file in wrong:
            self._run("push", str(bundle / file), str(ROOT / name / file))
            problem = self._problem(name, file, files)
            if problem is not None:
                raise PackageError(f"{self.app}: {problem} after it was pushed; push again")
            told(file, files[file][0])
        return Delivered(len(wrong), len(files) - len(wrong), sum(files[file][0] for file in wrong))

    def wrong(self, name: str, files: Files) -> dict[str, str]:
        """File -> what is wrong with it, of those that are not there as they should be. Pulls every file."""
        found = {file: self._problem(name, file, files) for file in files}
        return {file: problem for file, problem in found.items() if problem is not None}

    def _problem(self, name: str, file: str, files: Files) -> str | None:
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / file
            local.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._run("pull", str(ROOT / name / file), str(local))
            except ServiceError as error:
                return f"{file} cannot be read back ({error})"
            wrong = wrong_files({file: files[file]}, Path(folder))
        return wrong[0] if wrong else None

    def _make_folders(self, name: str, files: Files) -> None:
        """A push of one file wants its folder to exist; a push of a folder makes it: so an empty tree goes first."""
        with tempfile.TemporaryDirectory() as folder:
            for file in files:
                (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
            self._run("push", folder, str(ROOT / name))

    def _run(self, verb: str, source: str, target: str) -> None:
        command = [*self.program, "apps", verb, self.app, source, target, "--documents"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS_MAX
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceError(f"{MODULE} apps {verb}: no end within {SECONDS_MAX:g} s") from error
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()[-1]
            raise ServiceError(f"{MODULE} apps {verb}: exit code {done.returncode}: {said}")
