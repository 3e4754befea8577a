"""Commands to workers by hand: given, and waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
import msgspec
import redis

from tokenyard.admin.signals import Unacknowledged
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.signal_options import holdout_fields, say_holdouts
from tokenyard.process.program import Exit
from tokenyard.protocol.commands import Acknowledgement, Command, decode_acknowledgement
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts

_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Told:
    """A command that was given."""

    id: str
    command: Command
    name: str  # of the worker, without its incarnation


def tell(scripts: Scripts, named: Sequence[tuple[str, Command]]) -> list[Told]:
    """Give commands, each with the name of its worker."""
    return [Told(scripts.command(command) or "", command, name) for name, command in named]


def wait_for(
    connection: redis.Redis, keys: Keys, told: Sequence[Told], timeout_s: float
) -> list[Unacknowledged]:
    """Wait for the answers; who refuses, or has not answered after ``timeout_s``."""
    until = time.monotonic() + timeout_s
    answers: dict[str, Acknowledgement] = {}
    while True:
        for one in told:
            packed: Any = connection.hvals(keys.acks(one.id)) if one.id not in answers else []
            if packed:
                answers[one.id] = decode_acknowledgement(packed[0])
        left_s = until - time.monotonic()
        if len(answers) == len(told) or left_s <= 0:
            break
        time.sleep(min(_POLL_S, left_s))
    holdouts = []
    for one in told:
        answer = answers.get(one.id)
        if answer is None or not answer.done:
            reason = answer.reason if answer else ""
            holdouts.append(Unacknowledged(one.command.worker, one.name, reason))
    return holdouts


def report(
    ctx: click.Context,
    told: Sequence[Told],
    holdouts: Sequence[Unacknowledged],
    *,
    about: dict[str, Any],
    as_json: bool,
    done: str,
    timeout_s: float,
) -> None:
    """Say what came of commands, and end with the exit status that stands for it."""
    if as_json:
        workers = [one.command.worker for one in told]
        fields = {"ids": [one.id for one in told], "workers": workers}
        fields["holdouts"] = holdout_fields(holdouts)  # type: ignore[assignment]
        say(msgspec.json.encode(about | fields))
    elif holdouts:
        say_holdouts(holdouts, timeout_s)
    else:
        say(done)
    ctx.exit(Exit.UNAVAILABLE if holdouts else Exit.OK)
