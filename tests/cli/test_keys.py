"""`tokenyard keys`: what a key cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenyard.process.program import Exit
from tokenyard.protocol.api_keys import ApiKey, encode_key
from tokenyard.yard.keys import list_keys

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("option", "given", "reason"),
    [
        pytest.param("--models", "", "models: name one or more", marks=pytest.mark.long),
        pytest.param("--classes", " , ", "classes: name one or more", marks=pytest.mark.long),
        ("--name", "x" * 201, "--name: give 200 characters at most"),
    ],
)
def test_what_a_key_cannot_have_creates_none(
    run: Run, quiet: Any, option: str, given: str, reason: str
) -> None:
    refused = run("keys", "create", "--tenant", "research", option, given)

    assert refused.returncode == Exit.USAGE
    assert reason in refused.stderr
    assert list_keys(quiet) == {}


def test_a_key_that_may_use_nothing_is_listed_as_such(run: Run, quiet: Any) -> None:
    key = ApiKey(tenant="research", models=[], classes=[])
    quiet.connection.hset(quiet.keys.api_keys, "0" * 64, encode_key(key))

    assert run("keys", "list").stdout.split().count("none") == 2
