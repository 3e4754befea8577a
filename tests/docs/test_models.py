"""docs/models.md tells every key of the models file, and what it shows can be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import code, first_names, page, rows, section
from worker.models import AdapterSpec, ModelSpec, read_models

MODELS = page("docs/models.md")
KEYS = section(MODELS, "## Keys").partition("### Paths")[0]
ADAPTER_KEYS = section(MODELS, "### Adapters")


def fields(kind: type[Any]) -> dict[str, Any]:
    """The keys that a table of this kind may have, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(kind) if field.name != "name"}


@pytest.mark.parametrize(("text", "kind"), [(KEYS, ModelSpec), (ADAPTER_KEYS, AdapterSpec)])
def test_every_key_is_told_with_its_default(text: str, kind: type[Any]) -> None:
    known = fields(kind)
    assert first_names(text) == set(known)
    for row in rows(text):
        default, told = known[row[0].strip("`")], row[1].strip("`").partition(":")[0]
        if isinstance(default, bool):
            assert told == ("on" if default else "off"), row
        elif isinstance(default, int | float):
            assert told == f"{default:g}", row
        elif isinstance(default, str) and default:
            assert told == default, row


@pytest.mark.parametrize("example", code(MODELS, "toml"))
def test_every_example_can_be_read(example: str, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(example, encoding="utf-8")

    assert read_models(file)
