"""What can be done with models: load, unload, put to sleep, wake, and give new weights.

Unloading, sleeping and waking command all workers that hold the model, or the named one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from tokenyard.ops.control import Signals, Unacknowledged, await_acknowledgements
from tokenyard.ops.names import find_model, find_worker
from tokenyard.ops.operation import Caller, Field, Operation, Outcome, Preview, operation
from tokenyard.ops.signals import Mode
from tokenyard.protocol.control import Command, DesiredState, DesiredStates, Invalid
from tokenyard.protocol.errors import BadInput, NotObeyed, Refused
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import counted
from tokenyard.protocol.worker_info import ModelInfo, WorkerState
from tokenyard.scripts import Scripts
from tokenyard.yard.snapshot import WorkerView, YardView, read_yard

if TYPE_CHECKING:
    from coordinator.placement.devices import PlacementDevice

#: Workers that a preview names.
_MOST_NAMED: Final = 20
#: What would happen: to the model, by so many workers.
_WOULD: Final[dict[Change, str]] = {
    "unload": "{model} is unloaded from {workers}; running requests finish first. Unless the"
    " coordinator is static, it is loaded again when requests wait for it.",
    "sleep": "{workers} with {model} go to sleep; running requests finish first.",
    "wake": "{workers} that sleep with {model} wake up.",
}

Model = Annotated[str, Field(noun="model")]
LoadingWorker = Annotated[
    str,
    Field(
        "Worker",
        "Empty: where it displaces least. Its present model goes to sleep or is unloaded.",
        noun="worker",
    ),
]
HoldingWorker = Annotated[str, Field("Worker", "Empty: all of them.", noun="worker")]
Level = Annotated[
    int,
    Field(
        "Level",
        "1: the host's memory keeps the weights. 2: nothing is kept; waking reads files.",
        least=1,
        most=2,
    ),
]
Path = Annotated[
    str,
    Field(
        "Folder of the checkpoint",
        "An absolute path on the workers' hosts; empty: the model's own weights.",
        may_be_empty=True,
    ),
]
NewEpoch = Annotated[int | None, Field("Epoch", "Empty: the present one plus 1.")]
Timeout = Annotated[int, Field("Time-out, s", "For all steps together.", least=1, most=86_400)]
#: What a worker can do with the model that it holds.
Change = Literal["unload", "sleep", "wake"]
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


def plan_load(view: YardView, model: str, name: str = "") -> ModelPlan:
    """Load a model on the worker of this name, or where it displaces least; raises `Refused`."""
    held = [one.worker for one in holders(view, model, name) if one.is_ready]
    if held:
        return ModelPlan([], f"loaded already by {', '.join(held)}")
    command = place_at(view, model, name) if name else place_anywhere(view, model)
    who = command.worker
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


# Where `load` loads a model: on the worker that displaces least.


def place_at(view: YardView, model: str, name: str) -> Command:
    """Load a model on the worker of this name; raises `Refused`."""
    offers = _offers(view, model)
    here = [one for one in view.living if one.info and one.info.name == name]
    if not here:
        raise Refused(f"worker {name!r} is not live now")
    worker = max(here, key=lambda one: one.lease_ms)
    _refuse_paused(worker)
    controller = worker.info.controller if worker.info else ""
    if controller not in offers:
        those = ", ".join(sorted(offers))
        raise Refused(
            f"{controller}, the host of {name}, may not load {model!r}; these may: {those}"
        )
    return Command(verb="load", worker=worker.worker, model=model)


def place_anywhere(view: YardView, model: str) -> Command:
    """Load a model on the worker that displaces least; raises `Refused`.

    It prefers a free device with a sleeping engine of the model, then any free device, then one
    whose model is idle.
    """
    from coordinator.placement.devices import Worker, map_devices

    workers = [Worker(one.worker, one.info, one.lane) for one in view.living if one.info]
    devices, _ = map_devices(workers)
    found = [
        group
        for controller, info in sorted(_offers(view, model).items())
        if len(group := sorted(_options(devices, controller, model))[: info.ranks]) == info.ranks
    ]
    if not found:
        raise Refused(
            f"no device is free or idle for {model!r}: wait, or name a worker, which finishes its"
            " running requests first"
        )
    cheapest = min(found, key=lambda group: group[-1][0])
    # The leader must not be a follower in another group.
    leader, *others = sorted(cheapest, key=lambda option: (option[3], option[1]))
    indexes = [index for _, index, *_ in (leader, *others)] if others else []
    return Command(verb="load", worker=leader[2], model=model, devices=indexes)


def _offers(view: YardView, model: str) -> dict[str, ModelInfo]:
    """What the hosts that may load a model say of it, by controller."""
    offers = {host.name: info for host in view.hosts for info in host.models if info.name == model}
    if not offers:
        raise Refused(f"no live host may load {model!r}: put it into a models file")
    return offers


def _refuse_paused(worker: WorkerView) -> None:
    info = worker.info
    if info and info.run_state != "RUNNING":
        first = "resume and unpause" if info.run_state == "SUSPENDED" else "unpause"
        raise Refused(f"{info.name} is {info.run_state}: {first} it first")


def _options(
    devices: Sequence[PlacementDevice], controller: str, model: str
) -> Iterator[tuple[int, int, str, bool]]:
    """Cost, index, worker, and whether that is a follower, for each available device."""
    for device in devices:
        holder, worker = device.holder, device.entrance(model)
        if device.id[0] != controller or worker is None or worker.info.run_state != "RUNNING":
            continue
        is_idle = holder is not None and holder.is_ready and not holder.leader.load
        if device.is_free or is_idle:
            cost = 2 * (not device.is_free) + (device.sleeper(model) is None)
            yield cost, device.id[1], worker.worker, worker.info.state == "attached"


# The operations.


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model, and the worker if one is named, in a yard."""

    view: YardView
    model: str
    worker: str  # its name; "": none is named


def _asked(yard: Yard, model: str, worker: str = "") -> _Asked:
    """Raises `Refused` for names that the yard does not know."""
    view = read_yard(yard)
    name = find_worker(view, worker) if worker else ""
    return _Asked(view, find_model(view, model), name)


def _send(yard: Yard, caller: Caller, verb: str, asked: _Asked, plan: ModelPlan) -> Outcome:
    """Send the commands of a plan; their answers come later."""
    why = caller.why or f"requested by {caller.operator}"
    scripts, model, sent = Scripts(yard), asked.model, dict[str, Unacknowledged]()
    names = {one.worker: one.info.name for one in asked.view.workers if one.info}
    for one in plan.commands:
        entry = scripts.command(msgspec.structs.replace(one, why=why))
        sent[entry] = Unacknowledged(one.worker, names[one.worker])
    return Outcome(
        f"{model}: {plan.sent if sent else plan.done}",
        target=f"model {model}" + (f" on {asked.worker}" if asked.worker else ""),
        done=f"{model}: {plan.done}",
        details={"commands": " ".join(sent)},
        fields={
            "verb": verb,
            "model": model,
            "redundant": not sent,
            "ids": list(sent),
            "workers": [one.worker for one in sent.values()],
        },
        wait=lambda timeout_s: await_acknowledgements(yard, sent, timeout_s),
    )


def _preview_load(yard: Yard, _caller: Caller, *, model: str, worker: str = "") -> Preview:
    asked = _asked(yard, model, worker)
    try:
        plan = plan_load(asked.view, model, asked.worker)
    except Refused as error:
        return Preview(f"{model} cannot be loaded now: {error}.")  # another worker may be named
    said = plan.sent or f"{plan.done}; name another worker to load it once more"
    return Preview(f"{model} {said}. What runs there finishes first.")


@operation("model.load", "Load a model", _preview_load)
def load(yard: Yard, caller: Caller, *, model: Model, worker: LoadingWorker = "") -> Outcome:
    """Load a model on a worker whose host may load it.

    Without --worker, a worker is chosen where the model sleeps, or whose device is free or idle;
    nothing is done if a worker holds the model. With --worker, that one loads it: its running
    requests finish first, and its present model is put to sleep or unloaded.

    Examples:
      tokenyard models load adder
      tokenyard models load adder --worker gpu-1-0
      tokenyard models load adder --no-wait --json
    """
    asked = _asked(yard, model, worker)
    return _send(yard, caller, "load", asked, plan_load(asked.view, model, asked.worker))


def _preview_of(verb: Change) -> Callable[..., Preview]:
    def preview(
        yard: Yard, caller: Caller, *, model: str, worker: str = "", **more: Any
    ) -> Preview:
        del caller, more
        asked = _asked(yard, model, worker)
        plan = plan_change(asked.view, verb, model, asked.worker)
        if not plan.commands:
            return Preview(f"{model}: {plan.done}.", count=0)
        names = [one.worker for one in plan.commands]
        text = _WOULD[verb].format(model=model, workers=counted(len(names), "worker"))
        return Preview(text, names[:_MOST_NAMED], len(names))

    return preview


def _change(
    yard: Yard, caller: Caller, verb: Change, model: str, worker: str, level: int = 1
) -> Outcome:
    asked = _asked(yard, model, worker)
    plan = plan_change(asked.view, verb, model, asked.worker, level)
    return _send(yard, caller, verb, asked, plan)


@operation("model.unload", "Unload a model", _preview_of("unload"), is_dangerous=True)
def unload(yard: Yard, caller: Caller, *, model: Model, worker: HoldingWorker = "") -> Outcome:
    """Unload a model from its workers; running requests finish first.

    Examples:
      tokenyard models unload adder
      tokenyard models unload adder --worker gpu-1-0
    """
    return _change(yard, caller, "unload", model, worker)


@operation("model.sleep", "Put a model to sleep", _preview_of("sleep"))
def sleep(
    yard: Yard, caller: Caller, *, model: Model, worker: HoldingWorker = "", level: Level = 1
) -> Outcome:
    """Put the workers that hold a model to sleep; running requests finish first.

    Examples:
      tokenyard models sleep adder
      tokenyard models sleep adder --worker gpu-1-0 --level 2
    """
    return _change(yard, caller, "sleep", model, worker, level)


@operation("model.wake", "Wake a model", _preview_of("wake"))
def wake(yard: Yard, caller: Caller, *, model: Model, worker: HoldingWorker = "") -> Outcome:
    """Wake the workers that sleep with a model.

    Examples:
      tokenyard models wake adder
      tokenyard models wake adder --worker gpu-1-0
    """
    return _change(yard, caller, "wake", model, worker)


def _preview_reload(yard: Yard, _caller: Caller, *, model: str) -> Preview:
    view = _asked(yard, model).view
    held = sum(bool(one.info and one.info.model == model) for one in view.living)
    text = (
        f"{model} is paused, the weights are loaded by {counted(held, 'worker')}, its epoch"
        f" becomes {_next_epoch(view.desired_states, model)}, and it runs again. If a worker cannot"
        " load them, all return to the weights of before."
    )
    return Preview(text, values={"path": view.desired_states.of("", model).weights})


@operation("model.reload", "Give a model new weights", _preview_reload, is_long=True)
def reload(
    yard: Yard,
    caller: Caller,
    *,
    model: Model,
    path: Path,
    epoch: NewEpoch = None,
    mode: Mode = "abort",
    timeout: Timeout = 600,
) -> Outcome:
    """Give a model new weights: pause it, load them, increase its epoch, unpause it.

    All workers that hold the model replace their weights with the checkpoint at PATH and clear
    their prefix caches; workers that load it later use the same checkpoint. PATH is a folder on the
    workers' hosts, of the same architecture; each checkpoint needs its own path. An empty PATH
    restores the model's own weights.

    With --mode abort, running requests continue under the new weights after their published tokens.
    With `wait` they finish first. With `keep` they continue in place, with the old weights' KV
    cache.

    Examples:
      tokenyard models reload policy --path /checkpoints/step-200
      tokenyard models reload policy --path /checkpoints/step-300 --epoch 300 --mode wait
      tokenyard models reload policy --path ''

    Each host that may load the model checks PATH first. If a worker cannot load the weights, all
    workers return to the previous ones under the previous epoch.
    """
    if path and not PurePosixPath(path).is_absolute():
        raise BadInput(
            f"{path[:200]!r}: give an absolute path, as the workers' hosts see it", "path"
        )
    asked, signals = _asked(yard, model), Signals(yard)
    number = _next_epoch(asked.view.desired_states, model) if epoch is None else epoch
    try:
        left = signals.reload(model, path, number, mode, timeout, caller.operator)
    except Invalid as error:
        raise Refused(str(error)) from error
    now = signals.desired_states().of("", model)
    if left:
        raise _failure(model, now, left, timeout)
    return Outcome(
        f"{model}: {path or 'its own weights'}, in epoch {number}",
        target=f"model {model}",
        fields={
            "model": model,
            "path": path,
            "epoch": now.epoch,
            "mode": mode,
            "run_state": now.run_state,
            "weights": now.weights,
            "unacknowledged": [],
        },
    )


def _next_epoch(desired_states: DesiredStates, model: str) -> int:
    """The epoch after the present one; the first is 1."""
    return (desired_states.of("", model).epoch or 0) + 1


def _failure(
    model: str, now: DesiredState, left: Sequence[Unacknowledged], timeout_s: float
) -> Refused:
    """One sentence: a worker, its reason, and the present state of the model."""
    one = next((each for each in left if each.reason), left[0])
    reason = one.reason or f"has not answered after {timeout_s:g} s"
    others = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    epoch = "" if now.epoch is None else f" in epoch {now.epoch}"
    weights = now.weights or "its own weights"
    text = f"{one.name}{others}: {reason}; {model} is {now.run_state} with {weights}{epoch}"
    return Refused(text) if one.reason else NotObeyed(text)


OPERATIONS: Final[tuple[Operation, ...]] = (load, unload, sleep, wake, reload)
