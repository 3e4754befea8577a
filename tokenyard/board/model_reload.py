"""New weights for a model, from the board: `tokenyard models reload`.

A reload has several steps and takes as long as the workers do, so a thread carries it out. If the
board ends meanwhile, the leader reverts the reload after its time-out, as it does for a command
line that was killed.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Final, cast

from tokenyard import clock
from tokenyard.admin.audit import AuditEntry, record
from tokenyard.admin.reloads import is_checkpoint_path, next_epoch, reload_failure
from tokenyard.admin.signals import Signals
from tokenyard.board.action import ActionRefused, Input, Outcome, Preview
from tokenyard.board.model_choice import Asked, asked_for
from tokenyard.board.yard import Parameters
from tokenyard.broker.connection import translated
from tokenyard.protocol.control import PAUSE_MODES, Invalid, PauseMode
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.texts import counted
from tokenyard.protocol.yard import Yard

log = logging.getLogger("tokenyard.board")

#: So long the action waits itself: a reload that is refused is refused by then.
_SOON_S: Final = 1.0
_MOST_EPOCH: Final = 2**53
_TIMEOUT_S: Final = 600


def preview_reload(yard: Yard, given: Parameters) -> Preview:
    """How many workers get new weights, and which."""
    asked = asked_for(yard, given)
    states = asked.view.desired_states
    held = sum(bool(one.info and one.info.model == asked.model) for one in asked.view.living)
    now = states.of("", asked.model)
    text = (
        f"{asked.model} is paused, the weights are loaded by {counted(held, 'worker')}, its epoch"
        f" becomes {next_epoch(states, asked.model)}, and it runs again. If a worker cannot load"
        " them, all return to the weights of before."
    )
    inputs = [
        Input(
            "path",
            "Folder of the checkpoint",
            now.weights,
            hint="An absolute path on the workers' hosts; empty: the model's own weights.",
        ),
        Input("epoch", "Epoch", hint="Empty: the present one plus 1.", kind="number"),
        Input(
            "mode",
            "Running requests",
            "abort",
            choices=PAUSE_MODES,
            hint="abort: they continue under the new weights. wait: they finish first. keep: they"
            " continue in place.",
        ),
        Input("timeout", "Time-out, s", str(_TIMEOUT_S), kind="number"),
    ]
    return Preview(text, inputs)


def run_reload(yard: Yard, given: Parameters) -> Outcome:
    """Begin a reload. A result that comes soon is returned; a later one is in the audit only."""
    asked = asked_for(yard, given)
    path = given.text("path")
    if not is_checkpoint_path(path):
        raise ActionRefused(
            f"{path[:200]!r}: give an absolute path, as the workers' hosts see it.", "path"
        )
    states = asked.view.desired_states
    reload = _Reload(
        yard,
        asked,
        path=path,
        epoch=given.whole("epoch", next_epoch(states, asked.model), 0, _MOST_EPOCH),
        mode=cast(PauseMode, given.one_of("mode", PAUSE_MODES, "abort")),
        timeout_s=given.whole("timeout", _TIMEOUT_S, 1, 86_400),
        given=given,
    )
    return reload.begin()


@dataclass(slots=True)
class _Reload:
    """One reload, in a thread of its own."""

    yard: Yard
    asked: Asked
    path: str
    epoch: int
    mode: PauseMode
    timeout_s: int
    given: Parameters
    error: str = ""  # why it has failed
    is_late: bool = False  # its outcome is for the audit: nobody waits for it any more
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def target(self) -> str:
        """What it is done to."""
        return f"model {self.asked.model}"

    @property
    def _what(self) -> str:
        return f"{self.asked.model}: {self.path or 'its own weights'}, in epoch {self.epoch}"

    def begin(self) -> Outcome:
        """Start it, and wait a moment; raises `ActionRefused`."""
        name = f"reload {self.asked.model}"
        threading.Thread(target=self._run, name=name, daemon=True).start()
        clock.wait(self._done, _SOON_S)
        with self._lock:
            self.is_late = not self._done.is_set()
        if self.error:
            raise ActionRefused(self.error)
        if not self.is_late:
            return Outcome(f"{self._what}.", self.target)
        text = f"The reload has begun: {self._what}. The audit will tell how it ends."
        return Outcome(text, self.target)

    def _run(self) -> None:
        error = self._failure()
        with self._lock:
            self.error = error
            self._done.set()
            is_late = self.is_late
        if is_late:
            self._record()

    def _failure(self) -> str:
        """Carry it out; why it has failed, or ""."""
        signals = Signals(self.yard)
        model, by = self.asked.model, self.given.actor.operator
        try:
            with translated(self.yard.url):
                left = signals.reload(model, self.path, self.epoch, self.mode, self.timeout_s, by)
                now = signals.desired_states().of("", model)
        except (Invalid, TokenyardError) as error:
            return str(error)
        except Exception:
            # Without an outcome the operator would read for ever that it has begun.
            log.exception("the reload of %s has failed", model)
            return "it has failed; the board's log says why"
        return reload_failure(model, now, left, self.timeout_s) if left else ""

    def _record(self) -> None:
        """Write how it has ended to the audit."""
        entry = AuditEntry(
            who=self.given.actor.name,
            role=self.given.actor.role,
            action="model.reload",
            target=self.target,
            why=self.given.why,
            text="" if self.error else f"The reload has ended: {self._what}.",
            error=self.error,
        )
        try:
            with translated(self.yard.url):
                record(self.yard, entry)
        except TokenyardError as error:
            log.warning("the end of a reload is not in the audit: %s", error)
