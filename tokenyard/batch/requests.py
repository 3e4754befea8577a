"""From an input line to an item of `Client.map`, and from its result to an output line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

from tokenyard import clock
from tokenyard.batch.answers import OutputLine, answer_line, bad_line
from tokenyard.batch.lines import BadLine, ParsedLine, parse_line, repeated
from tokenyard.batch.state import BatchSpec
from tokenyard.client.options import FullPrompt, Item
from tokenyard.protocol.replies import Result

#: `Client.map` refuses an empty prompt without sending it, so an invalid line keeps its place.
_REFUSED: Final = ""


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line with the request that it asks for."""

    number: int
    request_id: str
    line: ParsedLine | BadLine
    item: Item


def line_request(
    spec: BatchSpec, number: int, raw: bytes | None, request_id: str, *, is_repeated: bool = False
) -> LineRequest:
    """The request of a line; the client chooses an id if ``request_id`` is empty."""
    line = parse_line(number, raw)
    if is_repeated and isinstance(line, ParsedLine):
        line = repeated(line.custom_id)
    if isinstance(line, BadLine):
        return LineRequest(number, request_id, line, _REFUSED)
    own: dict[str, Any] = {
        "model": spec.model,
        **line.options,
        "prompt": line.prompt,
        "params": spec.params | line.params,
    }
    if request_id:
        own["id"] = request_id
    return LineRequest(number, request_id, line, cast(FullPrompt, own))


def output_for(job: str, request: LineRequest, result: Result) -> OutputLine:
    """The output line for a result."""
    if isinstance(request.line, BadLine):
        return bad_line(job, request.number, request.line)
    return answer_line(job, request.number, request.line, result, clock.wall())
