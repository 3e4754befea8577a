"""A parameter of an operation is one line: it is an option, a field of a form, and in the audit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from click.testing import CliRunner

from tests.board.device_yard import DeviceYard
from tests.board.looking import Looker, looking
from tests.support.api_keys import create_key
from tests.support.builders import make_request
from tokenyard.board import app
from tokenyard.board.operations import OPERATIONS
from tokenyard.board.page import Actor
from tokenyard.cli.shared.operating import command
from tokenyard.ops.audit import read_audit
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, carry_out, operation
from tokenyard.ops.tenants import set_tenant
from tokenyard.process.program import YardChoice
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.tenants import TenantSettings

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
    bare: Yard,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Outcome],
    is_there: bool,
) -> None:
    """Given an operation without and with a parameter, I expect it in all three places, or none."""
    op = made(run)
    given = {"colour": "blue"} if is_there else {}

    # On the command line it is an option with a help text,
    help_text = on_the_command_line(op, bare.keys, redis_url, "--help").output
    assert ("--colour" in help_text) == is_there
    assert ("Colour. Any that you like." in help_text) == is_there
    words = [f"--{name}={value}" for name, value in given.items()]
    told = on_the_command_line(
        op, bare.keys, redis_url, "the-fence", *words, "--by", "kim", "--json"
    )
    assert json.loads(told.stdout) == {"what": "the-fence", **given}
    # on the board a field of the form,
    monkeypatch.setattr(app, "OPERATIONS", {op.name: op})
    with looking(monkeypatch, redis_url, bare) as looker:
        assert ('name="colour"' in looker.ask(op.name, {"what": "the-fence"})) == is_there
        # and the audit has what was given, of both.
        looker.do(op.name, {"what": "the-fence", **given})
    by_board, by_cli = looker.audit()
    assert by_board.details == by_cli.details == {"what": "the-fence", **given}
    assert (by_cli.who, by_cli.role, by_board.who) == ("kim", "cli", "olga")


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ZeroDivisionError("of ours")])
def test_what_breaks_in_the_middle_is_in_the_audit(bare: Yard, fault: BaseException) -> None:
    def run(yard: Yard, caller: Caller, *, what: str) -> Outcome:
        raise fault

    with pytest.raises(type(fault)):
        carry_out(bare, made(run), Caller("kim", "cli", "a try"), {"what": "the-fence"})

    [entry] = read_audit(bare)
    assert (entry.who, entry.why, entry.details) == ("kim", "a try", {"what": "the-fence"})
    assert entry.error == (str(fault) or "KeyboardInterrupt")


#: Operations that need another state of the yard; the tests of their pages ask for them.
ELSEWHERE = {
    *("signal.unpause", "signal.suspend", "signal.resume", "model.wake"),
    *("request.requeue", "batch.cancel", "batch.resume"),
}


def test_each_operation_has_a_form(devices: DeviceYard, looker: Looker) -> None:
    # Given a yard with one of everything,
    devices.serve("adder")
    devices.scripts.submit("normal", [make_request("q", client="ann")])
    set_tenant(devices, "ann", lambda _: TenantSettings(weight=2))
    _, key_id = create_key(devices, "ann")
    fields = {"client": "ann", "id": "dead", "prompt": "x", "dead_reason": "POISONED: twice"}
    letter = devices.connection.xadd(devices.keys.dead, {**fields, "dead_sid": "low/1-0"})
    given = {"scope": "all", "model": "adder", "tenant": "ann", "key": key_id}
    given |= {"letter": letter.decode(), "request": "ann/q"}
    looker.actor = Actor("olga", "admin")
    # I expect each to ask with a form that has its fields.
    asked = OPERATIONS.keys() - ELSEWHERE
    assert len(asked) > 10
    for name in asked:
        op = OPERATIONS[name]
        wanted = (one for one in op.parameters if one.name in given and one.field.noun)
        named = {
            one.name: given[one.name]
            for one in wanted
            if one.is_required or one.type is tuple or one.name == "scope"
        }
        page = looker.ask(name, named)
        assert f'action="/board/do/{name}"' in page, name
        for one in op.parameters:
            if one.field.label and one.name not in named:
                assert f'name="{one.name}"' in page, (name, one.name)
