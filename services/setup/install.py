"""The order of a set-up, its lock and its stamp.

Every step is skipped when what it makes is there and made from the same inputs; the stamp inside .venv remembers the
inputs, step by step, so that an interrupted set-up goes on where it stopped and a finished one costs a fraction of a
second. Two set-ups of one checkout at a time: the second waits for the first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from services.setup import checks, model, processor, steps, wheel

CHECKOUT = Path(__file__).resolve().parents[2]
ALWAYS_WITH = "test"


class Place(NamedTuple):
    """Where things of one checkout lie."""

    checkout: Path

    @property
    def state(self) -> Path:
        """Wheels, models, logs: what outlives the virtual environment."""
        return self.checkout / ".outrigger"

    @property
    def python(self) -> Path:
        """The virtual environment's interpreter."""
        return self.checkout / ".venv" / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """What the virtual environment was made from; goes away with it."""
        return self.checkout / ".venv" / "outrigger-setup.json"

    @property
    def log(self) -> Path:
        """Everything that the steps of the last set-up said."""
        return self.state / "setup.log"


def set_up(arguments: list[str], checkout: Path = CHECKOUT) -> int:
    """Do what is missing. Returns the exit code; every failure has been told on standard error."""
    parser = argparse.ArgumentParser(prog="make setup", description=__doc__)
    parser.add_argument("--quiet", action="store_true", help="say nothing when nothing is missing")
    parser.add_argument("--with", dest="extras", action="append", default=[], metavar="EXTRA")
    parser.add_argument("--model", dest="models", action="append", default=[], choices=list(model.MODELS))
    options = parser.parse_args(arguments)
    place = Place(checkout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        plan = Plan(place, {ALWAYS_WITH, *options.extras}, options.models)
        if not plan.missing():
            if not options.quiet:
                print(f"set-up: nothing to do ({plan.summary()})", file=sys.stderr)
            return 0
        with only_one(place.state / "setup.lock"):
            Plan(place, {ALWAYS_WITH, *options.extras}, options.models).carry_out()
    except (checks.SetupError, OSError) as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up interrupted; run the same again and it goes on where it stopped", file=sys.stderr)
        return 130
    return 0


class Plan:
    """What one set-up has to do: the wanted state beside the found one."""

    def __init__(self, place: Place, extras: set[str], models: Sequence[str] = ()) -> None:
        """extras: of pyproject.toml. models: names of model.MODELS wanted beside the one that is always there."""
        self.place = place
        names = dict.fromkeys((model.SMOLLM2.name, *models))
        self.models = {f"model {name}": model.MODELS[name] for name in names}
        self.found = _read_json(place.stamp)
        self.recipe = wheel.recipe(amx_verdict(place.state))
        project = (place.checkout / "pyproject.toml").read_bytes()
        self.wanted = {
            "venv": f"Python {sys.version_info[0]}.{sys.version_info[1]} in {place.checkout}",
            "wheel": self.recipe.key,
            "packages": hashlib.sha256(project).hexdigest(),
            "extras": sorted(extras | set(self.found.get("extras", []))),
        } | {step: each.sha256 for step, each in self.models.items()}
        if not _runs(place.python):
            self.found = {}

    def summary(self) -> str:
        """The set-up in a line."""
        return (
            f"Python {platform.python_version()}, {wheel.PACKAGE} {wheel.VERSION}, AMX {self.recipe.amx.word}, "
            f"model {model.SMOLLM2.file}"
        )

    def missing(self) -> list[str]:
        """Names of the steps that have to be done, in their order."""
        if self.found.get("venv") != self.wanted["venv"]:
            self.found = {}
        names = [name for name in ("venv", "wheel") if self.found.get(name) != self.wanted[name]]
        if any(self.found.get(name) != self.wanted[name] for name in ("packages", "extras")):
            names.append("packages")
        for step, each in self.models.items():
            if self.found.get(step) != each.sha256 or not each.is_there(self.place.state):
                names.append(step)
        if "wheel" in names and wheel.kept(self.recipe.key, self.place.state) is None:
            names.insert(names.index("wheel"), "compile")
        return names

    def carry_out(self) -> None:
        """Do the missing steps, stamping each. Raises SetupError with a text for the user."""
        names = self.missing()
        checks.refuse(checks.problems(self.place.checkout, "venv" in names, "compile" in names))
        began = time.monotonic()
        self.place.log.write_bytes(b"")
        progress = steps.Progress(len(names))
        for name in names:
            if name in self.models:
                self._do_model(name, progress)
            else:
                getattr(self, f"_do_{name}")(progress)
        shutil.rmtree(self.place.state / "tmp", ignore_errors=True)
        if names:
            print(
                f"set-up: complete in {steps.clock(time.monotonic() - began)} ({self.summary()})",
                file=sys.stderr,
            )

    def _do_venv(self, progress: steps.Progress) -> None:
        progress.begin(f"virtual environment with Python {platform.python_version()}")
        folder = self.place.checkout / ".venv"
        if folder.is_symlink():
            raise checks.SetupError(
                f"{folder} is a link to {os.readlink(folder)}, which would be emptied to begin anew\n"
                f"  remedy: rm {folder}, then run it again: this checkout gets an environment of its own"
            )
        self._run(progress, [sys.executable, "-m", "venv", "--clear", str(folder)])
        self._stamp("venv")
        progress.done()

    def _do_compile(self, progress: steps.Progress) -> None:
        amx = self.recipe.amx
        faults = "; AMX kills the process that uses it here and is left out" if amx.word == "faults" else ""
        progress.begin(
            f"compiling {wheel.PACKAGE} {wheel.VERSION}",
            f"once for this processor, about five minutes on two cores{faults}",
        )
        wheel.build(
            self.recipe, self.place.python, self.place.state, progress, self.place.log, self._environment()
        )
        progress.done()

    def _do_wheel(self, progress: steps.Progress) -> None:
        progress.begin(f"installing {wheel.PACKAGE} {wheel.VERSION}")
        path = wheel.kept(self.recipe.key, self.place.state)
        self._pip(progress, "install", "--no-deps", "--force-reinstall", "--no-index", str(path))
        self._stamp("wheel")
        progress.done()

    def _do_packages(self, progress: steps.Progress) -> None:
        progress.begin("installing the packages named in pyproject.toml")
        extras = ",".join(self.wanted["extras"])
        self._pip(progress, "install", "--editable", f"{self.place.checkout}[{extras}]")
        self._run(
            progress, [str(self.place.python), "-c", "import llama_cpp; llama_cpp.llama_backend_init()"]
        )
        self._stamp("packages", "extras")
        progress.done()

    def _do_model(self, step: str, progress: steps.Progress) -> None:
        wanted = self.models[step]
        progress.begin(f"fetching the model {wanted.title}", wanted.terms)
        model.fetch(
            wanted, self.place.python, self.place.state, progress, self.place.log, self._environment()
        )
        self._stamp(step)
        progress.done()

    def _pip(self, progress: steps.Progress, *arguments: str) -> None:
        self._run(progress, [str(self.place.python), "-m", "pip", *arguments])

    def _run(self, progress: steps.Progress, command: list[str]) -> None:
        steps.run(command, progress, self.place.log, self._environment())

    def _environment(self) -> dict[str, str]:
        """The user's environment, with everything pip writes kept inside the checkout's ignored folders."""
        for name in ("tmp", "cache"):
            (self.place.state / name).mkdir(parents=True, exist_ok=True)
        kept = {
            k: v
            for k, v in os.environ.items()
            if k not in ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__")
        }
        ours = {
            "PIP_CACHE_DIR": str(self.place.state / "cache"),
            "TMPDIR": str(self.place.state / "tmp"),
            "PIP_USER": "0",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
        }
        return {**kept, **ours}

    def _stamp(self, *names: str) -> None:
        self.found.update({name: self.wanted[name] for name in names})
        partial = self.place.stamp.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, self.place.stamp)


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold the lock file `path` for the time of the block; wait, and say so, while another set-up holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        told = -steps.LINE_EVERY_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - told >= steps.LINE_EVERY_S:
                    told = time.monotonic()
                    holder = path.read_text(encoding="utf-8").strip() or "unknown"
                    print(f"set-up: another one is at work here (process {holder}); waiting", file=sys.stderr)
                time.sleep(0.2)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def amx_verdict(state: Path) -> processor.AmxVerdict:
    """The verdict on AMX, asked once a processor and kernel, since asking may cost a child its life."""
    if "amx_tile" not in processor.instruction_sets():
        return processor.amx_verdict(False, "cc", state / "probe")
    asked = {"processor": processor.identity(), "kernel": platform.release()}
    path = state / "amx.json"
    known = _read_json(path)
    if all(known.get(name) == value for name, value in asked.items()):
        return processor.AmxVerdict(known["word"], tuple(known["flags"]))
    compilers = checks.find_compilers()
    if compilers is None:
        return processor.AmxVerdict("untried for want of a compiler", processor.AMX_OFF)
    verdict = processor.amx_verdict(True, compilers.cc, state / "probe")
    path.write_text(
        json.dumps({**asked, "word": verdict.word, "flags": verdict.flags}) + "\n", encoding="utf-8"
    )
    return verdict


def _read_json(path: Path) -> dict:
    """A JSON object from disk; empty when there is none or it is damaged, which only means that work is redone."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _runs(python: Path) -> bool:
    """Whether the virtual environment's Python still starts and has pip."""
    test = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pip') is None)"
    try:
        return (
            subprocess.run([str(python), "-c", test], capture_output=True, timeout=60, check=False).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
