"""The right answers of the simulated engine."""

from __future__ import annotations

from typing import Any

from tokenyard.protocol.replies import Choice
from tokenyard.protocol.wire import Assignment, Request
from worker.engines import Finished
from worker.engines.simulated.engine import SimulatedEngine


def simulated_answer(request: Request, **options: Any) -> Choice:
    """The answer of an undisturbed engine with these options."""
    engine = SimulatedEngine(**options)
    engine.add(Assignment(request=request, entry="1-0", sid="normal/1-0", attempt=1))
    while True:
        for event in engine.step():
            if isinstance(event, Finished):
                return event.choices[0]
