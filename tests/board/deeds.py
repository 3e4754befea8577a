"""Stand-ins for the actions of the board."""

from __future__ import annotations

import dataclasses

from tokenyard.board.action import Action, Outcome, Preview
from tokenyard.board.yard import Parameters
from tokenyard.protocol.yard import Yard


class Deeds:
    """Stand in for all actions, and note what is called."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def of(self, action: Action) -> Action:
        def preview(yard: Yard, given: Parameters) -> Preview:
            return Preview("It would be done.")

        def run(yard: Yard, given: Parameters) -> Outcome:
            self.done.append(action.name)
            return Outcome("It is done.", "everything")

        return dataclasses.replace(action, preview=preview, run=run)
