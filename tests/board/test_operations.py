"""A parameter of an operation is one line: it is an option, a field of a form, and in the audit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import redis
from click.testing import CliRunner

from tests.board.looking import looking
from tokenyard.board import app
from tokenyard.cli.shared.operating import command
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.process.program import YardChoice
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.yard import Yard

Colour = Annotated[str, Field("Colour", "Any that you like.")]


def preview(yard: Yard, caller: Caller, **given: Any) -> Preview:
    return Preview("It would be painted.")


def before(yard: Yard, caller: Caller, *, what: str) -> Outcome:
    """Paint something."""
    return Outcome(f"{what} is painted", what, fields={"what": what})


def after(yard: Yard, caller: Caller, *, what: str, colour: Colour = "red") -> Outcome:
    """Paint something."""
    return Outcome(f"{what} is painted {colour}", what, fields={"what": what, "colour": colour})


def made(run: Callable[..., Outcome]) -> Operation:
    return operation("test.paint", "Paint", preview)(run)


def on_the_command_line(op: Operation, keys: Keys, url: str, *words: str) -> Any:
    run = command(op, "paint", "Paint it.", arguments=["what"])
    return CliRunner().invoke(run, words, obj=YardChoice(url, keys.yard, debug=False))


@pytest.mark.parametrize(("run", "is_there"), [(before, False), (after, True)])
def test_a_parameter_is_one_line(
    connection: redis.Redis,
    keys: Keys,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Outcome],
    is_there: bool,
) -> None:
    """Given an operation without and with a parameter, I expect it in all three places, or none."""
    op = made(run)
    given = {"colour": "blue"} if is_there else {}

    # On the command line it is an option with a help text,
    help_text = on_the_command_line(op, keys, redis_url, "--help").output
    assert ("--colour" in help_text) == is_there
    assert ("Colour. Any that you like." in help_text) == is_there
    words = [f"--{name}={value}" for name, value in given.items()]
    told = on_the_command_line(op, keys, redis_url, "the-fence", *words, "--by", "kim", "--json")
    assert json.loads(told.stdout) == {"what": "the-fence", **given}
    # on the board a field of the form,
    monkeypatch.setattr(app, "OPERATIONS", {op.name: op})
    with looking(monkeypatch, redis_url, connection, keys) as looker:
        assert ('name="colour"' in looker.ask(op.name, {"what": "the-fence"})) == is_there
        # and the audit has what was given, of both.
        looker.do(op.name, {"what": "the-fence", **given})
    by_board, by_cli = looker.audit()
    assert by_board.details == by_cli.details == {"what": "the-fence", **given}
    assert (by_cli.who, by_cli.role, by_board.who) == ("kim", "cli", "olga")
