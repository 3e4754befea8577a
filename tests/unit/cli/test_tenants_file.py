"""`tenants.toml`: what it may say, and every mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenyard.cli.tenants.apply import read_tenants_file
from tokenyard.protocol.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("[tenants.ann\n", ["is not TOML"]),
        ("[tenants.ann]\nwieght = 1\n", ["tenants.ann.wieght: is not known; did you mean weight?"]),
        ("[tenants.ann]\nweight = 0\n", ["tenants.ann.weight: ", ">= 0.001"]),
        ("[tenants.ann]\nweight = -1\n", ["tenants.ann.weight: ", ">= 0.001"]),
        ("[tenants.ann]\nweight = nan\n", ["tenants.ann.weight: "]),
        ("[tenants.ann]\nweight = inf\n", ["tenants.ann.weight: "]),
        ("[tenants.ann]\nweight = '2'\n", ["tenants.ann.weight: Expected `float`, got `str`"]),
        ("[tenants.ann]\nmax_tokens = 1.5\n", ["tenants.ann.max_tokens: "]),
        ("[tenants.ann]\nmodels = 'a'\n", ["tenants.ann.models: "]),
        ("[tenants.ann]\nmodels = []\n", ["tenants.ann.models: "]),
        ("[tenants.ann]\nclasses = ['urgent']\n", ["tenants.ann.classes: ", "high, normal, low"]),
        ("[tenants]\nann = 3\n", ["tenants.ann: must be a table"]),
        ("[tenant.ann]\nweight = 1\n", ["tenant: is not known; did you mean tenants?"]),
        ("[defaults]\nlimit = 1\n", ["defaults.limit: is not known"]),
        ("[tenants.'a/b']\nweight = 1\n", ["a/b", "A-Z a-z 0-9"]),
        ("tenants = 1\nx = 2\n", ["tenants: must be a table", "x: is not known"]),
        ("\udcff", ["is not TOML"]),
    ],
)
def test_every_mistake_is_named(tmp_path: Path, text: str, reasons: list[str]) -> None:
    path = tmp_path / "tenants.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SettingsError) as refused:
        read_tenants_file(path)
    for reason in reasons:
        assert reason in str(refused.value)
