"""The glossary has the words that the code coins: those that its field does not have."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, page, section

pytestmark = pytest.mark.vllm  # its names are the field's

PACKAGES = ("tokenyard", "coordinator", "gateway", "worker")
FIELD = ("click", "openai", "prometheus_client", "redis", "rq", "starlette", "transformers", "vllm")
NAMED = re.compile(r"^\s*(?:class|def|async def)\s+(\w+)", re.MULTILINE)
#: A word in the names of so many classes is one that a reader must learn.
OFTEN = 3
MOST = 25
#: Ordinary English, which says what it means.
ORDINARY = {"asking", "locating", "lost", "simulated", "submission"}


def words_of(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def field_words() -> set[str]:
    found: set[str] = set()
    for package in FIELD:
        spec = importlib.util.find_spec(package)
        assert spec
        assert spec.origin
        for file in Path(spec.origin).parent.rglob("*.py"):
            for name in NAMED.findall(file.read_text(encoding="utf-8", errors="ignore")):
                found.update(words_of(name))
    return found


def classes() -> Iterator[str]:
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    yield node.name


def glossary() -> set[str]:
    return set(
        re.findall(
            r"^- \*\*([^*]+)\*\*:", section(page("docs/README.md"), "## Words"), re.MULTILINE
        )
    )


def test_words_that_the_code_coins_are_in_the_glossary() -> None:
    names: defaultdict[str, set[str]] = defaultdict(set)
    for name in classes():
        for word in words_of(name):
            names[word].add(name)
    field = field_words()
    assert len(field) > 2_000
    often = {word for word, of in names.items() if len(of) >= OFTEN}
    coined = {word for word in often if not {word, word.rstrip("s")} & field} - ORDINARY
    assert {"roster", "yard"} <= coined
    assert coined <= glossary()


def test_the_glossary_is_short_and_linked() -> None:
    assert 10 < len(glossary()) <= MOST
    assert "(docs/README.md#words)" in page("README.md")
