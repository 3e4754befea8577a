"""`tokenyard tenants`: shares, limits and usage, as operators set and see them."""

from __future__ import annotations

import datetime
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.operating import Command
from tests.support.yard import PlayedYard
from tokenyard.ops.tenants import set_tenant
from tokenyard.process.program import Exit
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.yard.tenants import read_tenants

FILE = """
[defaults]
max_waiting_requests = 10_000

[tenants.research]
weight = 4

[tenants."team:eu"]
tokens_per_day = 1_000_000
max_waiting_requests = 0
classes = ["low"]
"""


@pytest.fixture
def command(command: Command) -> Command:
    return partial(command, "tenants")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    return path


def stored(yard: PlayedYard) -> dict[str, Any]:
    found: Any = yard.connection.hgetall(yard.keys.tenants)
    return {name.decode(): json.loads(packed) for name, packed in found.items()}


def events(yard: PlayedYard) -> int:
    found: Any = yard.connection.xrange(yard.keys.events)
    assert all(fields == {b"event": b"tenants"} for _, fields in found)
    return len(found)


# Setting


@pytest.mark.parametrize("given", ["", "all"])
def test_what_is_not_given_stays(yard: PlayedYard, command: Command, given: str) -> None:
    assert command("set", "ann", "--weight", "2").stdout == "ann: new, weight 2\n"
    done = command("set", "ann", "--tokens-per-day", "5000", "--models", "a,b")
    assert done.stdout == "ann: tokens_per_day no limit -> 5,000, models all -> a+b\n"
    assert stored(yard) == {"ann": {"weight": 2, "tokens_per_day": 5000, "models": ["a", "b"]}}
    done = command("set", "ann", "--tokens-per-day", "0", "--models", given, "--json")
    assert json.loads(done.stdout)["after"]["models"] is None
    assert stored(yard) == {"ann": {"weight": 2}}
    assert events(yard) == 3


def test_the_same_again_writes_nothing(yard: PlayedYard, command: Command) -> None:
    command("set", "ann", "--weight", "2")
    assert command("set", "ann", "--weight", "2").stdout == "ann: nothing to change\n"
    assert events(yard) == 1


def test_two_operators_at_once_both_count(yard: PlayedYard) -> None:
    # Given an operator whose change comes between reading and writing of another one's
    def slow(before: TenantSettings) -> TenantSettings:
        if not stored(yard):
            set_tenant(yard, "ann", lambda _: TenantSettings(max_tokens=7))
        return TenantSettings(weight=2, max_tokens=before.max_tokens)

    set_tenant(yard, "ann", slow)
    assert stored(yard) == {"ann": {"weight": 2, "max_tokens": 7}}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["set", "ann"], "give at least one setting"),
        (["set", "a/b", "--weight", "1"], "A-Z a-z 0-9"),
        (["set", "ann", "--weight", "0"], "--weight"),
        (["set", "ann", "--max-tokens", "-5"], "--max-tokens"),
        (["set", "ann", "--classes", "fast"], "use high, normal, low"),
        (["set", "ann", "--wieght", "1"], "--weight"),
        (["sett", "ann"], "Did you mean 'set'?"),
    ],
)
def test_mistakes_set_nothing(
    yard: PlayedYard, command: Command, words: list[str], reason: str
) -> None:
    done = command(*words)
    assert done.exit_code == Exit.USAGE
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert stored(yard) == {}


def test_an_unknown_tenant_is_answered_with_a_similar_one(command: Command) -> None:
    command("set", "research", "--weight", "2")
    for words in (["show", "reserch"], ["remove", "reserch"], ["usage", "reserch"]):
        done = command(*words)
        assert done.exit_code == Exit.FAILED
        assert "there is no tenant 'reserch'; did you mean research?" in done.stderr


def test_removed_is_as_never_set(yard: PlayedYard, command: Command) -> None:
    command("set", "ann", "--weight", "2")
    command("set", "bob", "--weight", "3")
    # If one of several is not known, I expect none to be removed.
    assert command("remove", "ann", "nobody").exit_code == Exit.FAILED
    assert command("remove", "ann", "bob").stdout == "settings of 2 tenants removed\n"
    assert stored(yard) == {}


# The file


def test_a_file_is_loaded_whole(yard: PlayedYard, command: Command, file: Path) -> None:
    command("set", "old", "--weight", "2")
    command("set", "research", "--weight", "2")
    done = command("apply", str(file), "--yes")
    assert done.exit_code == Exit.OK, done.stderr
    assert done.stdout.splitlines() == [
        "- old: weight 2",
        "~ research: weight 2 -> 4, max_waiting_requests no limit -> 10,000",
        "+ team:eu: weight 1, tokens_per_day 1,000,000, classes low",
        "3 tenants changed",
    ]
    assert stored(yard) == {
        "research": {"weight": 4, "max_waiting_requests": 10_000},
        "team:eu": {"tokens_per_day": 1_000_000, "classes": ["low"]},
    }
    assert events(yard) == 3
    assert command("apply", str(file)).stdout == "nothing to change: 2 tenants\n"


def test_a_dry_run_changes_nothing(yard: PlayedYard, command: Command, file: Path) -> None:
    assert "+ research" in command("apply", str(file), "--dry-run").stdout
    done = json.loads(command("apply", str(file), "--dry-run", "--json").stdout)
    assert done["applied"] is False
    assert [one["tenant"] for one in done["changes"]] == ["research", "team:eu"]
    assert command("apply", str(file)).exit_code == Exit.USAGE  # no terminal to ask on
    assert stored(yard) == {}


def test_every_mistake_of_a_file_is_named_and_nothing_changes(
    yard: PlayedYard, command: Command, file: Path
) -> None:
    command("set", "ann", "--weight", "2")
    file.write_text("tenants = 1\nx = 2\n")
    done = command("apply", str(file), "--yes")
    assert done.exit_code == Exit.USAGE
    assert f"{file}: tenants: must be a table" in done.stderr
    assert f"{file}: x: is not known" in done.stderr
    assert "Traceback" not in done.output
    assert stored(yard) == {"ann": {"weight": 2}}


def test_names_in_a_file_move_no_cursor(command: Command, file: Path) -> None:
    file.write_text('[tenants."\\u001b[31m\\u202e"]\nweight = 1\n')
    done = command("apply", str(file), "--yes")
    assert done.exit_code == Exit.USAGE
    assert not {"\x1b", "\u202e"} & {*done.output}


def test_a_missing_file_is_wrong_usage(command: Command) -> None:
    done = command("apply", "/nowhere")
    assert (done.exit_code, "/nowhere" in done.stderr) == (Exit.USAGE, True)


# Looking


@pytest.fixture
def busy(yard: PlayedYard) -> None:
    """Two tenants in line and one at rest, as the scripts leave them."""
    yard.connection.hset(yard.keys.tenants, "ann", encode_tenant(TenantSettings(weight=3)))
    for name, waiting in (("ann", 5), ("bob", 7), ("cem", 0)):
        counts = {"waiting": waiting, "waiting_tokens": 10 * waiting, "running": 2}
        yard.connection.hset(yard.keys.tenant(name), mapping=counts)  # type: ignore[arg-type]
        yard.connection.zadd(yard.keys.service, {name: 100.5})
        if waiting:
            yard.connection.zadd(yard.keys.line, {name: 100.5})


@pytest.mark.usefixtures("busy")
def test_list_shows_shares_of_those_that_wait(command: Command) -> None:
    table = command("list").stdout
    assert re.search(r"ann +3 +75.0% +5 +50 +2\n", table)
    assert re.search(r"bob +1 +25.0% +7 +70 +2\n", table)
    assert re.search(r"cem +1 +- +0 +0 +2\n", table)
    assert "2 tenants" in command("list", "--waiting").stdout
    listed = json.loads(command("list", "--json").stdout)
    assert [(one["name"], one["share"], one["is_set"]) for one in listed] == [
        ("ann", 0.75, True),
        ("bob", 0.25, False),
        ("cem", None, False),
    ]
    shown = command("show", "ann").stdout
    assert re.search(r"weight +3 *\n", shown)
    assert re.search(r"Waiting +5 requests, 50 tokens *\n", shown)


def test_settings_that_cannot_be_read_are_said_and_repaired(
    yard: PlayedYard, command: Command, file: Path
) -> None:
    yard.connection.hset(yard.keys.tenants, mapping={"ann": b"\x1b{", "a/b\x1b": b"{}"})  # type: ignore[arg-type]
    yard.connection.hset(yard.keys.tenant("ann"), mapping={"waiting": "-3", "running": "x\x1b"})
    text = command("list").stdout
    assert "cannot be read: set them again" in " ".join(text.split())
    assert "\x1b" not in text
    (one,) = read_tenants(yard)
    assert (one.waiting, one.running, one.is_readable) == (0, 0, False)
    assert "~ ann" not in command("apply", str(file), "--yes").stdout
    assert set(stored(yard)) == {"research", "team:eu"}


# Usage


def test_usage_by_day_and_model(yard: PlayedYard, command: Command) -> None:
    now = datetime.datetime.now(datetime.UTC)
    today, before, kept, old = (
        f"{now - datetime.timedelta(back):%Y%m%d}" for back in (0, 3, 61, 62)
    )
    yard.connection.zadd(yard.keys.service, {"ann": 1, "bob": 2})
    counts = {"requests": 100, "in": 5000, "cached": 50, "out": 700, "failed": 2, "cancelled": 1}
    counts |= {"failed:WORKER_LOST": 1, "failed:POISONED": 1, "failed:made_up\x1b": 7}
    fields = {f"{today} llama {what}": count for what, count in counts.items()}
    waits = {8: 60, 1024: 38, 65536: 2}
    fields |= {f"{today} llama wait:{bucket}": count for bucket, count in waits.items()}
    hostile = {"x": "1", f"{today} \x1b[31m in": "3", "99 m in": "1", f"{today} m wait:x": "1"}
    yard.connection.hset(yard.keys.usage("ann"), mapping=fields | hostile)  # type: ignore[arg-type]
    others = {f"{day} llama out": 9 for day in (before, kept, old)}
    yard.connection.hset(yard.keys.usage("bob"), mapping=others)  # type: ignore[arg-type]
    text = command("usage").stdout
    assert re.search(r"ann +\S+ +llama +100 +5,000 +700 +8 ms +1 m", text)
    assert "\x1b" not in text
    total = "100 requests, 5,003 tokens in, 700 out; failed: 1 POISONED, 1 WORKER_LOST\n"
    assert total in text
    assert "made_up" not in text
    assert "1 POISONED, 1 WORKER_LOST" in command("usage", "--verbose").stdout.replace(total, "")
    rows = json.loads(command("usage", "--model", "llama", "--days", "4", "--json").stdout)
    assert [(row["tenant"], row["tokens_out"]) for row in rows] == [("ann", 700), ("bob", 9)]
    assert (rows[0]["wait_p50_ms"], rows[0]["wait_p99_ms"]) == (8, 65536)
    assert rows[1]["wait_p50_ms"] is None
    assert [row["failures"] for row in rows] == [{"WORKER_LOST": 1, "POISONED": 1}, {}]
    assert json.loads(command("usage", "bob", "--json").stdout) == []
    left: Any = yard.connection.hkeys(yard.keys.usage("bob"))
    assert {name.decode()[:8] for name in left} == {before, kept}


def test_an_empty_yard_has_no_tenants(command: Command) -> None:
    assert command("list").stdout == "0 tenants\n"
    assert command("list", "--json").stdout == "[]\n"
    told = command("usage").stdout
    assert told == "nothing was used; requests without a tenant are not counted\n"
