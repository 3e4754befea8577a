"""Signals: what is paused, by whom and why, who has not obeyed, the buttons for it; the audit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from tokenyard.board.page import Parameters, numbered_page
from tokenyard.ops.audit import MAX_ENTRIES, read_audit
from tokenyard.ops.control import Signals, Unacknowledged
from tokenyard.protocol.control import ALL, DesiredState, RunState, model_scope, said, worker_scope
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.worker_info import WorkerInfo
from tokenyard.yard.changes import GivenSignal, read_given_signals, still_there
from tokenyard.yard.pauses import known_models, known_workers, scopes_of
from tokenyard.yard.snapshot import RosterView, WorkerView, read_roster

_MOST_SCOPES: Final = 50
_MOST_LEFT: Final = 20
_MOST_GIVEN: Final = 20
_MOST_MODELS: Final = 50
_PAGE: Final = 25
#: Entries of the audit on one page.
_ENTRIES: Final = 50
#: What may be asked of a scope in a run state, beside ending it.
_NEXT: Final[Mapping[RunState, Sequence[tuple[str, str]]]] = {
    "RUNNING": (("signal.pause", "Pause"),),
    "PAUSED": (("signal.unpause", "Unpause"), ("signal.suspend", "Suspend")),
    "SUSPENDED": (("signal.resume", "Resume"),),
}


#: A scope, its desired state, and how many of its workers follow it.
ScopeRow = Mapping[str, Any]


def _rows(roster: RosterView, left: Iterable[Unacknowledged]) -> Callable[[str], ScopeRow]:
    """Makes the row of a scope."""
    counts = Counter(scope for info in roster.live.values() for scope in scopes_of(info))
    left_in = defaultdict[str, list[Unacknowledged]](list)
    for one in left:
        for scope in scopes_of(roster.live[one.worker]):
            left_in[scope].append(one)

    def row(scope: str) -> ScopeRow:
        state = roster.desired_states.by_scope.get(scope, DesiredState())
        return {
            "scope": scope,
            "name": said(scope),
            "desired": state,
            "workers": counts[scope],
            "left": left_in[scope],  # who have not obeyed yet
            "buttons": _NEXT[state.run_state],  # name and label of each
        }

    return row


def view_signals(yard: Yard, given: Parameters) -> dict[str, Any]:
    """What is set for whom, and who has not obeyed."""
    roster = read_roster(yard)
    left = Signals(yard).behind(roster)
    row = _rows(roster, left)
    wanted = given.text("q")
    names = [name for name in known_workers(roster) if wanted in name]
    page = numbered_page(given, len(names), _PAGE, "/signals", q=wanted)
    shown = names[page.first : page.end]
    models = known_models(roster)
    by_signals = read_given_signals(yard)
    changed = sorted(roster.desired_states.by_scope)
    return {
        "everybody": row(ALL),
        "set": [row(scope) for scope in changed[:_MOST_SCOPES]],
        "more_set": max(0, len(changed) - _MOST_SCOPES),
        "left": left[:_MOST_LEFT],
        "more_left": max(0, len(left) - _MOST_LEFT),
        "ending": _ending(by_signals, roster.live),
        "live": roster.live,
        "given": by_signals[:_MOST_GIVEN],
        "models": [row(model_scope(name)) for name in models[:_MOST_MODELS]],
        "more_models": max(0, len(models) - _MOST_MODELS),
        "workers": _workers(shown, roster, row),
        "count": len(names),
        "q": wanted,
        "numbered": page,
    }


def _ending(
    given: Iterable[GivenSignal], live: Mapping[str, WorkerInfo]
) -> list[tuple[GivenSignal, list[str]]]:
    """Each DRAIN and STOP that some workers have not followed to the end, and these workers."""
    return [(one, left) for one in given if (left := still_there(one, live))][:_MOST_LEFT]


def _workers(
    names: Sequence[str], roster: RosterView, row: Callable[[str], ScopeRow]
) -> list[tuple[ScopeRow, WorkerView | None, RunState]]:
    """Each with its view, None where only a desired state names it, and its combined run state."""
    views = {one.info.name: one for one in roster.workers if one.info and one.lease_ms}
    found = []
    for name in names:
        view = views.get(name)
        model = view.info.model if view and view.info else ""
        combined = roster.desired_states.of(name, model).run_state
        found.append((row(worker_scope(name)), view, combined))
    return found


def view_audit(yard: Yard, given: Parameters) -> dict[str, Any]:
    """What operators have done, a part of it."""
    before = given.text("before")
    found = read_audit(yard, _ENTRIES + 1, before)
    shown = found[:_ENTRIES]
    return {
        "entries": shown,
        "is_newest": not before,
        "before": shown[-1].entry if len(found) > _ENTRIES else "",
        "most": MAX_ENTRIES,
    }
