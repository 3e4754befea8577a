"""From a line of the input to what `Client.map` takes, and from its result to a line of output."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final, cast

from tokenyard.batch.answers import OutputLine, answer_line, bad_line
from tokenyard.batch.lines import BadLine, ParsedLine, parse_line
from tokenyard.batch.state import BatchSpec
from tokenyard.client.options import FullPrompt, Item
from tokenyard.protocol.replies import Result

#: `Client.map` answers an empty prompt at once, in its place: so bad lines keep theirs.
_REFUSED: Final = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A line whose answer is not there yet."""

    number: int
    request_id: str
    sought: ParsedLine | BadLine
    item: Item


def ask_for(
    spec: BatchSpec, number: int, raw: bytes | None, request_id: str, *, is_repeated: bool = False
) -> Asked:
    """What to ask for a line; ``request_id`` may be empty: then the client makes one."""
    sought = parse_line(number, raw)
    if is_repeated and isinstance(sought, ParsedLine):
        message = f"custom_id {sought.custom_id!r}: an earlier line has it already"
        sought = BadLine(sought.custom_id, message, "duplicate_custom_id")
    if isinstance(sought, BadLine):
        return Asked(number, request_id, sought, _REFUSED)
    own: dict[str, Any] = {
        "model": spec.model,
        **sought.options,
        "prompt": sought.prompt,
        "params": spec.params | sought.params,
    }
    if request_id:
        own["id"] = request_id
    return Asked(number, request_id, sought, cast(FullPrompt, own))


def output_for(job: str, asked: Asked, result: Result) -> OutputLine:
    """The output for a line whose request has ended, or was never sent."""
    if isinstance(asked.sought, BadLine):
        return bad_line(job, asked.number, asked.sought)
    return answer_line(job, asked.number, asked.sought, result, time.time())
