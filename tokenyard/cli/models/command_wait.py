"""Sends commands to workers and waits for their answers."""

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
from tokenyard.cli.shared.signal_options import say_unacknowledged, unacknowledged_fields
from tokenyard.process.program import Exit
from tokenyard.protocol.commands import Acknowledgement, Command, decode_acknowledgement
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts

_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class SentCommand:
    """A command that was sent."""

    id: str
    command: Command
    name: str  # of the worker, without its incarnation


def send(scripts: Scripts, named: Sequence[tuple[str, Command]]) -> list[SentCommand]:
    """Send commands, each with the name of its worker."""
    return [SentCommand(scripts.command(command) or "", command, name) for name, command in named]


def wait_for(
    connection: redis.Redis, keys: Keys, sent: Sequence[SentCommand], timeout_s: float
) -> list[Unacknowledged]:
    """Wait for the answers; the workers that refuse, or do not answer in ``timeout_s``."""
    until = time.monotonic() + timeout_s
    answers: dict[str, Acknowledgement] = {}
    while True:
        for one in sent:
            packed: Any = connection.hvals(keys.acks(one.id)) if one.id not in answers else []
            if packed:
                answers[one.id] = decode_acknowledgement(packed[0])
        left_s = until - time.monotonic()
        if len(answers) == len(sent) or left_s <= 0:
            break
        time.sleep(min(_POLL_S, left_s))
    unacknowledged = []
    for one in sent:
        answer = answers.get(one.id)
        if answer is None or not answer.done:
            reason = answer.reason if answer else ""
            unacknowledged.append(Unacknowledged(one.command.worker, one.name, reason))
    return unacknowledged


def report(
    ctx: click.Context,
    sent: Sequence[SentCommand],
    unacknowledged: Sequence[Unacknowledged],
    *,
    about: dict[str, Any],
    as_json: bool,
    done: str,
    timeout_s: float,
) -> None:
    """Print the outcome of commands, and exit with its status."""
    if as_json:
        workers = [one.command.worker for one in sent]
        fields = {"ids": [one.id for one in sent], "workers": workers}
        fields["unacknowledged"] = unacknowledged_fields(unacknowledged)  # type: ignore[assignment]
        say(msgspec.json.encode(about | fields))
    elif unacknowledged:
        say_unacknowledged(unacknowledged, timeout_s)
    else:
        say(done)
    ctx.exit(Exit.UNAVAILABLE if unacknowledged else Exit.OK)
