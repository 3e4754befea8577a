"""`tokenyard keys`: what a key cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenyard.process.program import Exit
from tokenyard.protocol.api_keys import ApiKey, encode_key
from tokenyard.yard.keys import list_keys

Run = Callable[..., Any]


@pytest.mark.long
@pytest.mark.parametrize(("option", "given"), [("--models", ""), ("--classes", " , ")])
def test_an_empty_list_is_not_a_key_that_opens_nothing(
    run: Run, quiet: Any, option: str, given: str
) -> None:
    refused = run("keys", "create", "--tenant", "research", option, given)

    assert refused.returncode == Exit.USAGE
    assert f"{option[2:]}: name one or more" in refused.stderr
    assert list_keys(quiet) == {}


def test_a_name_is_short_enough_for_a_list(run: Run, quiet: Any) -> None:
    refused = run("keys", "create", "--tenant", "research", "--name", "x" * 201)

    assert refused.returncode == Exit.USAGE
    assert "--name: give 200 characters at most" in refused.stderr
    assert list_keys(quiet) == {}


def test_a_key_that_may_use_nothing_is_listed_as_such(run: Run, quiet: Any) -> None:
    key = ApiKey(tenant="research", models=[], classes=[])
    quiet.connection.hset(quiet.keys.api_keys, "0" * 64, encode_key(key))

    assert run("keys", "list").stdout.split().count("none") == 2
