"""The operations that the client's core asks of a connection.

The core is a set of generators: each yields operations and is sent their answers, or an error is
thrown in. `tokenyard.client.sync` carries them out with threads, `tokenyard.client.aio` with
asyncio; neither decides anything.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenyard.protocol.errors import TokenyardError
from tokenyard.scripts.calls import Call

T = TypeVar("T")

#: A Redis command with its arguments.
Command = tuple[str | bytes | int | float, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """Run commands in one round trip. Answer: the list of their answers.

    Not a transaction: a server without memory refuses to queue one, even of reading commands.

    With ``waits`` the last one is `submission.wait_command`, whose answer may be the server's
    error. Where the connection breaks, all commands are run again.
    """

    commands: Sequence[Command]
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait; ends early when the client closes. Answer: None."""

    seconds: float


Operation = Call[Any] | Ask | Delay
#: A generator of the core that returns a T.
Steps = Generator[Operation, Any, T]


def advance(steps: Steps[Any], answer: Any) -> Operation:
    """The next operation; an answer that is an error is thrown in. Raises `StopIteration`."""
    return steps.throw(answer) if isinstance(answer, TokenyardError) else steps.send(answer)


def checked(answers: list[Any], ask: Ask) -> list[Any]:
    """The answers; raises the first error among those of the commands."""
    for answer in answers[:-1] if ask.waits else answers:
        if isinstance(answer, Exception):
            raise answer
    return answers
