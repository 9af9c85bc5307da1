"""Every relative link of the documents leads to a file that is there, and every #anchor to a heading.

Method: links and headings are read from the Markdown files of the repository; nothing is fetched. Run by `make docs`.
"""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md"), *(TOP / "monitoring").glob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")


def anchors(path: Path) -> set[str]:
    """Headings as a link names them: lower case, blanks as hyphens, other signs left out."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in found}


def test_every_link_leads_somewhere() -> None:
    assert len(DOCUMENTS) > 10
    broken = []
    for path in DOCUMENTS:
        for target in LINK.findall(
            re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        ):
            if re.match(r"[a-z]+:", target):
                continue
            place, _, anchor = target.partition("#")
            file = (path.parent / place).resolve() if place else path
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{path.relative_to(TOP)}: {target}")
    assert not broken, "links that lead nowhere:\n  " + "\n  ".join(broken)


def test_make_help_has_a_line_for_every_target() -> None:
    text = (TOP / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    assert phony
    targets = phony[1].replace("\\\n", " ").split()
    helped = re.findall(r"^([a-z-]+):.*?## \S", text, re.MULTILINE)
    assert set(targets) == set(helped)
