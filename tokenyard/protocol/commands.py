"""Commands to controllers: what a control entry says, and what its acknowledgement says.

They travel on the stream ``control``; each controller reads all of it and obeys what is meant for
its workers. The roster says what came of it; acknowledgements are for whoever waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct

Verb = Literal["load", "unload", "sleep", "wake", "reset", "profile", "drain", "stop", "check"]


class Command(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that a worker is to do.

    ``load`` makes the worker's device serve ``model``: what runs there may finish, then it gives
    way (to sleep where the host keeps sleepers, else it is unloaded). With ``devices`` a group
    is formed on these, the worker's first. All verbs are idempotent.

    ``drain`` and ``stop`` end the worker's process for good: ``drain`` when it has finished what
    it has, ``stop`` at once, so that the rest goes back to the queue.

    ``check`` changes nothing: the worker's host looks whether ``model`` could have ``weights``.
    """

    verb: Verb
    worker: str  # with its incarnation: a command never reaches a successor
    model: str = ""  # load, check
    devices: list[int] = msgspec.field(default_factory=list)  # load of a group
    level: int = 1  # sleep: vLLM's sleep level
    start: bool = True  # profile: start or stop
    why: str = ""  # in words
    weights: str = ""  # check: path of a checkpoint


class Acknowledgement(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came of a command at one worker."""

    worker: str
    done: bool
    reason: str = ""  # why not


_command_decoder = msgspec.json.Decoder(Command)
_acknowledgement_decoder = msgspec.json.Decoder(Acknowledgement)


def command_fields(command: Command) -> dict[str, bytes]:
    """A command as the fields of its entry."""
    return {"command": msgspec.json.encode(command)}


def parse_command(fields: Mapping[bytes, bytes]) -> Command | None:
    """The command of an entry; None where there is none that we can read."""
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
