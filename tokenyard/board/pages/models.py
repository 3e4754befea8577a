"""Models: who holds each, who waits for it, and what loads of it have cost."""

from __future__ import annotations

from typing import Any, Final

from tokenyard.board.page import NotFound, Parameters, numbered_page
from tokenyard.protocol.control import DesiredState, model_scope
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import counted
from tokenyard.yard.changes import recent_commands
from tokenyard.yard.models import model_views, read_waiting_sample, why_it_waits
from tokenyard.yard.snapshot import read_yard

#: Models of one page.
ROWS: Final = 50
#: Commands, hosts and workers that are shown of one model.
MOST_COMMANDS: Final = 20
MOST_HOSTS: Final = 50
MOST_WORKERS: Final = 60


def view_models(yard: Yard, given: Parameters) -> dict[str, Any]:
    """The models whose names have a text."""
    view = read_yard(yard, counts_lanes=False)
    wanted = given.text("q").lower()
    every = model_views(view)
    found = [one for one in every if wanted in one.name.lower()]
    page = numbered_page(given, len(found), ROWS, "/models", q=given.text("q"))
    return {
        "models": found[page.first : page.end],
        "found": len(found),
        "total": len(every),
        "query": given.text("q"),
        "sample": read_waiting_sample(yard, view),
        "numbered": page,
        "commands": recent_commands(yard, MOST_COMMANDS),
    }


def view_model(yard: Yard, given: Parameters) -> dict[str, Any]:
    """One model."""
    view = read_yard(yard, counts_lanes=False)
    name = given.text("name")
    found = [one for one in model_views(view) if one.name == name]
    if not found:
        raise NotFound(f"There is no model {name[:200]!r}: no live host may load it.")
    [model] = found
    sample = read_waiting_sample(yard, view)
    commands = recent_commands(yard, MOST_COMMANDS, model=name)
    waiting = sample.of(name)
    why = why_it_waits(view, name, commands) if waiting.count else ""
    own = view.desired_states.by_scope.get(model_scope(name), DesiredState())
    return {
        "model": model,
        # Those with an error first.
        "hosts": sorted(model.offers.items(), key=lambda one: (not one[1].fault, one[0]))[
            :MOST_HOSTS
        ],
        "workers": list(model.workers.items())[:MOST_WORKERS],
        "sample": sample,
        "waiting": waiting,
        "why": why,
        "commands": commands,
        "scope": model_scope(name),
        "own": own,
        "pauses": [one.text(view.at_ms) for one in model.pauses],
        "devices": counted(model.ranks, "device"),
        "at_ms": view.at_ms,
    }
