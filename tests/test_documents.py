"""Every relative link in a document leads to a file, and to a heading where it names one."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(?P<text>.+?)\s*$", re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]*`")


def documents() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub makes of a document's headings."""
    text = FENCED.sub("", document.read_text(encoding="utf-8"))
    plain = (found["text"].lower() for found in HEADING.finditer(text))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def is_broken(document: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return False
    name, _, anchor = target.partition("#")
    goal = (document.parent / name).resolve() if name else document
    if not goal.exists() or not goal.is_relative_to(ROOT):
        return True
    return bool(anchor) and goal.suffix == ".md" and anchor not in anchors(goal)


def test_no_text_installs_the_package_by_its_name_which_nobody_owns() -> None:
    by_name = re.compile(r"tokenyard\[[a-z]|pip install (-\S+ )*['\"]?tokenyard\b")
    asked = {"pyproject.toml", "CHANGELOG.md", "tests/test_documents.py"}
    command = ["git", "grep", "--untracked", "-lIi", "tokenyard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = set(listed.stdout.splitlines()) - asked
    assert [name for name in sorted(names) if by_name.search((ROOT / name).read_text())] == []


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    text = INLINE_CODE.sub("", FENCED.sub("", document.read_text(encoding="utf-8")))
    targets = [found["target"] for found in LINK.finditer(text)]
    assert [target for target in targets if is_broken(document, target)] == []


def test_links_are_found_and_broken_ones_too() -> None:
    document = ROOT / "README.md"
    targets = [found["target"] for found in LINK.finditer(document.read_text(encoding="utf-8"))]
    assert any(target.startswith("docs/") for target in targets)
    for target in ("docs/nothing.md", "docs/protocol.md#nothing", "#nothing", "../elsewhere.md"):
        assert is_broken(document, target)
