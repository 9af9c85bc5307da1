"""Aim: the doors a newcomer tries first say the truth: make's help, what is not built, licence, links, settings named.

Method: the real Makefile run by make, the real documents read from disk.
"""

from __future__ import annotations

import re
import stat
import subprocess
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from services.cli.main import COMMANDS

TARGETS = (
    "help setup run demo test test-system check laws bench verify drill soak up down status logs chat doctor split "
    "pages dashboards service docs clean"
).split()


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60, check=False)


def recipes(checkout: Path) -> dict[str, str]:
    """Target -> its recipe, as written."""
    text = (checkout / "Makefile").read_text(encoding="utf-8")
    return {found[1]: found[2] for found in re.finditer(r"^([a-z-]+):.*\n((?:\t.*\n?)+)", text, re.M)}


def documents(checkout: Path) -> list[Path]:
    return [
        *checkout.glob("*.md"),
        *(checkout / "docs").rglob("*.md"),
        *(checkout / "monitoring").rglob("*.md"),
    ]


def test_make_alone_prints_one_line_for_every_target(checkout: Path) -> None:
    printed = make(checkout)
    assert printed.returncode == 0
    for target in TARGETS:
        lines = [line for line in printed.stdout.splitlines() if re.match(rf"  {target} +\S", line)]
        assert len(lines) == 1, f"{target}: {lines}"


def test_what_is_not_built_says_so_and_fails(checkout: Path) -> None:
    unbuilt = [target for target, recipe in recipes(checkout).items() if "$(NOT_BUILT)" in recipe]
    changelog = (checkout / "CHANGELOG.md").read_text(encoding="utf-8")
    help_lines = make(checkout).stdout.splitlines()
    for target in unbuilt:
        answer = make(checkout, target)
        assert answer.returncode == 2
        assert f"make {target}: not built yet" in answer.stderr
        assert f"`{target}`" in changelog or f"`make {target}`" in changelog
        assert any(line.startswith(f"  {target} ") and "not built yet" in line for line in help_lines)


def test_what_is_built_names_commands_that_exist(checkout: Path) -> None:
    called = {
        word for text in recipes(checkout).values() for word in re.findall(r"\$\(OUTRIGGER\) ([a-z-]+)", text)
    }
    assert {"run", "bench", "verify", "split"} <= called
    assert called <= set(COMMANDS)


def test_documents_name_only_commands_and_targets_that_exist(checkout: Path) -> None:
    """Looks at code spans and code blocks; prose may make or outrigger what it likes."""
    code = re.compile(r"```.*?```|`[^`]+`", re.S)
    for document in documents(checkout):
        text = "\n".join(code.findall(document.read_text(encoding="utf-8")))
        targets = set(re.findall(r"\bmake ([a-z][a-z-]+)", text))
        commands = set(re.findall(r"\boutrigger ([a-z][a-z0-9-]+)", text))
        assert targets <= set(recipes(checkout)), document
        assert commands <= set(COMMANDS), document


def test_the_build_script_runs_the_same_verbs(checkout: Path) -> None:
    script = checkout / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert re.search(r"^make test$", text, re.M)


def test_the_engine_is_pinned_in_one_version_everywhere(checkout: Path) -> None:
    from services.setup import wheel

    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"{wheel.PACKAGE}=={wheel.VERSION}" in project["dependencies"]
    assert distribution(wheel.PACKAGE).version == wheel.VERSION


def test_set_up_and_product_mean_the_same_model_file() -> None:
    from common.config import EMBEDDED_MODEL
    from services.setup import model

    assert Path(EMBEDDED_MODEL).name == model.SMOLLM2.file


@pytest.mark.parametrize(
    "name", ["LICENSE", "README.md", "CHANGELOG.md", "docker-compose.yml", "monitoring", "docs"]
)
def test_the_top_level_is_as_the_plan_says(checkout: Path, name: str) -> None:
    assert (checkout / name).exists()


def test_links_between_documents_lead_somewhere(checkout: Path) -> None:
    broken = [
        f"{document.relative_to(checkout)}: {target}"
        for document in documents(checkout)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert not broken


def test_paths_named_in_documents_exist(checkout: Path) -> None:
    """`common/...`, `services/...`, `tests/...` in backquotes are files or folders, unless the line says "planned"."""
    path = re.compile(r"`((?:common|services|device|tests|docs|monitoring)/[\w./-]*)`")
    broken = [
        f"{document.relative_to(checkout)}:{number}: {name}"
        for document in documents(checkout)
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1)
        if "planned" not in line
        for name in path.findall(line)
        if not (checkout / name).exists()
    ]
    assert not broken
