"""What operators can do with models: `tokenyard models load`, `unload`, `sleep`, `wake`, `reload`.

An action gives its commands and returns; the pages show the answers of the workers.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from tokenyard.admin.model_commands import (
    CHANGES,
    Change,
    ModelPlan,
    plan_change,
    plan_load,
    send,
)
from tokenyard.admin.model_placement import NoPlace, NoRoom
from tokenyard.board.action import Action, ActionRefused, Input, Outcome, Preview
from tokenyard.board.model_choice import Asked, asked_for
from tokenyard.board.model_reload import preview_reload, run_reload
from tokenyard.board.yard import Parameters
from tokenyard.protocol.texts import counted
from tokenyard.protocol.yard import Yard
from tokenyard.scripts import Scripts

#: Workers that a preview names.
_MOST_NAMED: Final = 20
_TITLES: Final[dict[Change, str]] = {
    "unload": "Unload a model",
    "sleep": "Put a model to sleep",
    "wake": "Wake a model",
}
#: What would happen: to the model, by so many workers.
_WOULD: Final[dict[Change, str]] = {
    "unload": "{model} is unloaded from {workers}; running requests finish first. Unless the"
    " coordinator is static, it is loaded again when requests wait for it.",
    "sleep": "{workers} with {model} go to sleep; running requests finish first.",
    "wake": "{workers} that sleep with {model} wake up.",
}


def _worker_input(asked: Asked, hint: str) -> Input:
    return Input("worker", "Worker", asked.worker, hint=hint)


def _preview_load(yard: Yard, given: Parameters) -> Preview:
    asked = asked_for(yard, given)
    try:
        plan = plan_load(asked.view, asked.model, asked.worker)
    except NoPlace as error:
        text = f"{asked.model} cannot be loaded now: {_reason(error)}."
    else:
        said = plan.sent or f"{plan.done}; name another worker to load it once more"
        text = f"{asked.model} {said}. What runs there finishes first."
    hint = "Empty: where it displaces least. Its present model goes to sleep or is unloaded."
    return Preview(text, [_worker_input(asked, hint)])


def _run_load(yard: Yard, given: Parameters) -> Outcome:
    asked = asked_for(yard, given)
    try:
        plan = plan_load(asked.view, asked.model, asked.worker)
    except NoPlace as error:
        raise ActionRefused(f"{asked.model}: {_reason(error)}.") from error
    return _sent(yard, given, asked, plan)


def _reason(error: NoPlace) -> str:
    """Why there is no place, in the words of the board, which has no options."""
    if isinstance(error, NoRoom):
        return "no device is free or idle: wait, or name a worker, which finishes its requests"
    return str(error)


def _preview_change(verb: Change, yard: Yard, given: Parameters) -> Preview:
    asked = asked_for(yard, given)
    plan = plan_change(asked.view, verb, asked.model, asked.worker)
    if not plan.commands:
        return Preview(f"{asked.model}: {plan.done}.", count=0)
    names = [one.worker for one in plan.commands]
    text = _WOULD[verb].format(model=asked.model, workers=counted(len(names), "worker"))
    inputs = [_worker_input(asked, "Empty: all of them.")]
    if verb == "sleep":
        hint = "1: the host's memory keeps the weights. 2: nothing is kept; waking reads files."
        inputs.append(Input("level", "Level", "1", choices=("1", "2"), hint=hint))
    return Preview(text, inputs, names[:_MOST_NAMED], len(names))


def _run_change(verb: Change, yard: Yard, given: Parameters) -> Outcome:
    asked = asked_for(yard, given)
    level = given.whole("level", 1, 1, 2)
    plan = plan_change(asked.view, verb, asked.model, asked.worker, level)
    return _sent(yard, given, asked, plan)


def _sent(yard: Yard, given: Parameters, asked: Asked, plan: ModelPlan) -> Outcome:
    """Send the commands of a plan; their answers come later."""
    why = given.why or f"requested by {given.actor.operator}"
    sent = send(Scripts(yard), asked.view, plan.commands, why)
    said = plan.sent if sent else plan.done
    target = f"model {asked.model}" + (f" on {asked.worker}" if asked.worker else "")
    return Outcome(
        f"{asked.model}: {said}.", target, details={"commands": " ".join(one.id for one in sent)}
    )


def _changes() -> list[Action]:
    return [
        Action(
            name=f"model.{verb}",
            title=_TITLES[verb],
            role="operator",
            preview=partial(_preview_change, verb),
            run=partial(_run_change, verb),
            is_dangerous=verb == "unload",
        )
        for verb in CHANGES
    ]


ACTIONS: Final[tuple[Action, ...]] = (
    Action("model.load", "Load a model", "operator", _preview_load, _run_load),
    *_changes(),
    Action("model.reload", "Give a model new weights", "operator", preview_reload, run_reload),
)
