"""What the client's core asks of a connection, as values.

The core is a set of generators: each yields operations and is sent their answers, or has an error
thrown in. `tokenyard.client.sync` carries them out with threads, `tokenyard.client.aio` with
asyncio; neither decides anything.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenyard.scripts import Call

T = TypeVar("T")

#: A Redis command with its arguments.
Command = tuple[str | bytes | int | float, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Run commands in one round trip. Answer: the list of their answers.

    No transaction: a server without memory refuses to queue one, even of commands that only read.

    With ``wait``, a command which waits until what the others wrote is safe, its answer comes last,
    or the server's error in its place. Where the connection breaks, all are run again.
    """

    commands: Sequence[Command]
    wait: Command | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait; ends early when the client closes. Answer: None."""

    seconds: float


Operation = Call[Any] | Ask | Pause
#: A piece of the core that ends with a T.
Steps = Generator[Operation, Any, T]


def checked(answers: list[Any], ask: Ask) -> list[Any]:
    """The answers; raises the first error among those of its commands."""
    for answer in answers[: len(ask.commands)]:
        if isinstance(answer, Exception):
            raise answer
    return answers
