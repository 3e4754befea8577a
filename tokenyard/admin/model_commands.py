"""Commands to workers that load, unload, put to sleep and wake models, and their answers.

A plan is a pure function of a `YardView`; nothing happens until its commands are sent. Errors of
redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import msgspec

from tokenyard import clock
from tokenyard.admin.model_placement import place_anywhere, place_at
from tokenyard.admin.signals import Unacknowledged
from tokenyard.admin.snapshot import WorkerView, YardView
from tokenyard.protocol.commands import Acknowledgement, Command, decode_acknowledgement
from tokenyard.protocol.worker_info import WorkerState
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts

#: What a worker can do with the model that it holds.
Change = Literal["unload", "sleep", "wake"]
CHANGES: Final[tuple[Change, ...]] = get_args(Change)
_POLL_S: Final = 0.1
#: States in which a worker can obey.
_FROM: Final[dict[Change, frozenset[WorkerState]]] = {
    "unload": frozenset({"loading", "ready", "asleep"}),
    "sleep": frozenset({"ready"}),
    "wake": frozenset({"asleep"}),
}
_DONE: Final[dict[Change, str]] = {"unload": "unloaded", "sleep": "asleep", "wake": "awake"}
_NOBODY: Final[dict[Change, str]] = {
    "unload": "no worker holds it",
    "sleep": "no worker has it ready",
    "wake": "no worker sleeps with it",
}


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Commands that change who holds a model."""

    commands: Sequence[Command]
    done: str  # what to say when all have obeyed, or none was needed
    sent: str = ""  # what to say when they were sent


@dataclass(frozen=True, slots=True)
class SentCommand:
    """A command that was sent."""

    id: str
    command: Command
    name: str  # of the worker, without its incarnation


def plan_load(view: YardView, model: str, name: str = "") -> ModelPlan:
    """Load a model on the worker of this name, or where it displaces least; raises `Refused`."""
    held = [one.worker for one in holders(view, model, name) if one.is_ready]
    if held:
        return ModelPlan([], f"loaded already by {', '.join(held)}")
    place = place_at(view, model, name) if name else place_anywhere(view, model)
    command = Command(verb="load", worker=place.worker, model=model, devices=list(place.devices))
    who = place.worker
    return ModelPlan([command], f"loaded by {who}", f"is to be loaded by {who}")


def plan_change(
    view: YardView, verb: Change, model: str, name: str = "", level: int = 1
) -> ModelPlan:
    """Command the workers that hold a model, or the one of this name; ``level`` is of sleep."""
    found = [one for one in holders(view, model, name) if one.state in _FROM[verb]]
    commands = [Command(verb=verb, worker=one.worker, level=level) for one in found]
    who = ", ".join(one.worker for one in found)
    done = f"{_DONE[verb]}: {who}" if found else _NOBODY[verb]
    return ModelPlan(commands, done, f"{verb} is commanded: {who}")


def holders(view: YardView, model: str, name: str = "") -> Sequence[WorkerView]:
    """The workers that hold a model, or the named one of them, without followers."""
    return [
        one
        for one in view.living
        if one.info and one.info.model == model and one.state != "attached"
        if name in {"", one.info.name}
    ]


def send(
    scripts: Scripts, view: YardView, commands: Iterable[Command], why: str
) -> list[SentCommand]:
    """Send commands with their reason."""
    names = {one.worker: one.info.name for one in view.workers if one.info}
    reasoned = [msgspec.structs.replace(one, why=why) for one in commands]
    return [SentCommand(scripts.command(one) or "", one, names[one.worker]) for one in reasoned]


def wait_for(yard: Yard, sent: Sequence[SentCommand], timeout_s: float) -> list[Unacknowledged]:
    """Wait for the answers; the workers that refuse, or do not answer in ``timeout_s``."""
    until = clock.monotonic() + timeout_s
    answers: dict[str, Acknowledgement] = {}
    while True:
        answers |= read_answers(yard, [one.id for one in sent if one.id not in answers])
        left_s = until - clock.monotonic()
        if len(answers) == len(sent) or left_s <= 0:
            break
        clock.sleep(min(_POLL_S, left_s))
    unacknowledged = []
    for one in sent:
        answer = answers.get(one.id)
        if answer is None or not answer.done:
            reason = answer.reason if answer else ""
            unacknowledged.append(Unacknowledged(one.command.worker, one.name, reason))
    return unacknowledged


def read_answers(yard: Yard, ids: Sequence[str]) -> Mapping[str, Acknowledgement]:
    """The answers to commands that have one, by the command's id."""
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for command in ids:
        pipeline.hvals(yard.keys.acks(command))
    answers = zip(ids, pipeline.execute(), strict=True)
    return {command: decode_acknowledgement(packed[0]) for command, packed in answers if packed}
