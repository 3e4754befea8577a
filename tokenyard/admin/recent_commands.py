"""The last commands to workers, by the leader and by operators, with what came of them.

The control stream is bounded, so this is no whole history; answers expire. Errors of redis-py pass,
for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final

from tokenyard.admin.model_commands import read_answers
from tokenyard.protocol.commands import Acknowledgement, Command, Verb, parse_command
from tokenyard.protocol.streams import position
from tokenyard.protocol.yard import Yard

#: Verbs that change who holds a model, and all that change what a worker does.
PLACING: Final[frozenset[Verb]] = frozenset({"load", "unload", "sleep", "wake"})
CHANGING: Final[frozenset[Verb]] = frozenset({*PLACING, "drain", "stop"})
#: Entries of the control stream that are read; signals are among them.
_MOST_READ: Final = 200


@dataclass(frozen=True, slots=True)
class RecentCommand:
    """A command that was sent, and the answer if there is one."""

    id: str
    command: Command
    answer: Acknowledgement | None = None  # None: not yet, or it has expired

    @property
    def at_ms(self) -> int:
        """When it was sent, unix ms by the server's clock."""
        return position(self.id)[0]

    @property
    def worker_name(self) -> str:
        """The worker's name without its incarnation."""
        return self.command.worker.rpartition(".")[0] or self.command.worker


def recent_commands(
    yard: Yard,
    most: int,
    *,
    model: str = "",
    worker: str = "",
    verbs: AbstractSet[Verb] = PLACING,
) -> list[RecentCommand]:
    """The newest commands with these verbs, the newest first.

    Optionally those that load ``model``, or those to the worker of this name.
    """
    found: Any = yard.connection.xrevrange(yard.keys.control, count=_MOST_READ)
    sent = [
        RecentCommand(entry.decode(), command)
        for entry, fields in found
        if (command := parse_command(fields)) and command.verb in verbs
    ]
    wanted = [
        one for one in sent if model in {"", one.command.model} and worker in {"", one.worker_name}
    ][:most]
    answers = read_answers(yard, [one.id for one in wanted])
    return [replace(one, answer=answers.get(one.id)) for one in wanted]
