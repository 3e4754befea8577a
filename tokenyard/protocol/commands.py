"""Commands to workers, and their acknowledgements.

Commands are sent on the stream ``control``; each controller reads all of it and carries out those
for its workers. The roster shows the effect; acknowledgements are for a caller that waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct

Verb = Literal["load", "unload", "sleep", "wake", "reset", "drain", "stop", "check"]


class Command(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command to one worker; all verbs are idempotent.

    ``load`` makes the worker's device serve ``model``: running requests may finish, then the
    previous model sleeps (where the host keeps sleepers) or is unloaded. With ``devices`` it forms
    a group on these, the worker's first.

    ``drain`` and ``stop`` end the worker's process for good: ``drain`` after its running requests,
    ``stop`` immediately, so that they go back to the queue.

    ``check`` changes nothing: the worker's host checks whether ``model`` could have ``weights``.
    """

    verb: Verb
    worker: str  # with its incarnation: a command never reaches a successor
    model: str = ""  # load, check
    devices: list[int] = msgspec.field(default_factory=list)  # load of a group
    level: int = 1  # sleep: vLLM's sleep level
    why: str = ""  # a reason, free text
    by: str = ""  # drain, stop: the operator, as user@host
    weights: str = ""  # check: path of a checkpoint


class Acknowledgement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of a command at one worker."""

    worker: str
    done: bool
    reason: str = ""  # where it is not done


_command_decoder = msgspec.json.Decoder(Command)
_acknowledgement_decoder = msgspec.json.Decoder(Acknowledgement)


def command_fields(command: Command) -> dict[str, bytes]:
    """A command as the fields of its entry."""
    return {"command": msgspec.json.encode(command)}


def parse_command(fields: Mapping[bytes, bytes]) -> Command | None:
    """The command of an entry; None where it has none that this version can read."""
    try:
        return _command_decoder.decode(fields.get(b"command", b""))
    except msgspec.MsgspecError:
        return None


def encode_acknowledgement(acknowledgement: Acknowledgement) -> bytes:
    """An acknowledgement as JSON."""
    return msgspec.json.encode(acknowledgement)


def decode_acknowledgement(packed: bytes) -> Acknowledgement:
    """Inverse of `encode_acknowledgement`."""
    return _acknowledgement_decoder.decode(packed)
