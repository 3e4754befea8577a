"""The words that were replaced stay out."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("tokenyard", "coordinator", "gateway", "worker")
#: What is read for old words, by folder and ending.
READ = {
    ".": ("*.md",),
    ".ci": ("*.py",),
    "benchmarks": ("**/*.py", "**/*.md"),
    "coordinator": ("**/*.py",),
    "deploy": ("**/*.md", "**/*.acl"),
    "docs": ("**/*.md", "**/*.pml"),
    "examples": ("**/*.py", "**/*.md"),
    "tests": ("**/*.py",),
    "tokenyard": ("**/*.py", "**/*.lua"),
    "worker": ("**/*.py",),
}
#: Old word -> what it is called now. As a part of a name too: `_shun`, `DeposedError`.
WORDS = {
    "anew": "again",
    "attendance": "client lease",
    "crew": "worker order",
    "crews": "worker order",
    "deposed": "lost leadership",
    "desk": "job record",
    "dialogue": "client core",
    "drafter": "request builder",
    "drafters": "request builders",
    "farewell": "eviction reason",
    "forestalled": "cancelled before arrival",
    "holdout": "unacknowledged",
    "holdouts": "unacknowledged",
    "mould": "request template",
    "mourn": "on exit",
    "muster": "start when complete",
    "posture": "desired state",
    "postures": "desired states",
    "rope": "wake pipe",
    "shun": "release held",
    "sought": "parsed line",
    "tether": "children",
    "timetable": "delay queue",
    "wish": "cancel",
    "wishers": "cancels",
    "wishes": "cancels",
}
#: Words of everyday English that were names of classes.
CLASSES = re.compile(
    "Attendance|Audit|Bearing|Bell|Bench|Care|Conduct|Conductor|Deposed|Dialogue|Draft|Drafter"
    "|Exchange|Given|Held|Hints|Holdout|Judge|Looks?|Mould|News|Orders|PipeTerm|Pooled|Posture"
    "|Promotion|Recall|Session|Sought|Standing|Tally|Timetable|Waiting|Window|(Yard)?Terms?"
)
#: File -> words that it needs for a reason.
EXCEPTIONS: dict[str, set[str]] = {
    "tests/test_names.py": set(WORDS),  # names them
    "benchmarks/llama.py": {"rope"},  # rotary position embeddings
    "tests/support/media_models.py": {"rope"},
    "tests/unit/worker/test_models_file.py": {"rope"},
}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def texts() -> Iterator[tuple[str, str]]:
    for folder, endings in READ.items():
        for ending in endings:
            for file in sorted((ROOT / folder).glob(ending)):
                if "node_modules" not in file.parts:
                    yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def classes() -> dict[str, list[str]]:
    """Where each class of the product is defined, by name."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PRODUCT:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(file.relative_to(ROOT)))
    return found


def test_no_class_has_an_old_name() -> None:
    assert len(classes()) > 200
    assert {name: files for name, files in classes().items() if CLASSES.fullmatch(name)} == {}


def test_no_old_word_is_used() -> None:
    found = []
    for name, text in texts():
        allowed = EXCEPTIONS.get(name, set())
        for number, line in enumerate(text.splitlines(), 1):
            words = {word.lower() for word in WORD.findall(line)} & WORDS.keys()
            found += [f"{name}:{number}: {word}: {WORDS[word]}" for word in words - allowed]
    assert found == [], f"{len(found)} old words"


def test_every_exception_is_needed() -> None:
    read = dict(texts())
    for name, words in EXCEPTIONS.items():
        assert words <= {word.lower() for word in WORD.findall(read[name])}, name
