"""From an input line to an item of `Client.map`, and from its result to an output line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

from tokenyard import clock
from tokenyard.batch.answers import OutputLine, answer_line, bad_line
from tokenyard.batch.files import read_lines
from tokenyard.batch.lines import BadLine, ParsedLine, parse_line, repeated
from tokenyard.batch.rows import parse_row
from tokenyard.batch.state import BatchSpec
from tokenyard.batch.tables import Row, read_rows
from tokenyard.client.build import RequestBuilder
from tokenyard.client.checks import content_size
from tokenyard.client.options import FullPrompt, Item
from tokenyard.protocol.packs import PACK_BYTES, PACK_INPUTS, in_packs
from tokenyard.protocol.replies import Result, split_result

#: A line of a file of requests, None for one that is too long, or a row of a table.
Raw = bytes | Row | BadLine | None

#: `Client.map` refuses an empty prompt without sending it, so an invalid line keeps its place.
_REFUSED: Final = ""


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A line with the request that it asks for."""

    number: int
    line: ParsedLine | BadLine
    item: Item


def check_params(spec: BatchSpec) -> None:
    """Raises `InvalidRequest` for default parameters that no line can have."""
    RequestBuilder("anon", None).prepare("?", {"task": spec.task, "params": spec.params})


def read_input(spec: BatchSpec) -> Iterator[tuple[int, Raw]]:
    """The lines or rows of a job's input, with their numbers; raises `UnreadableFile`."""
    if spec.is_table:
        return read_rows(spec.input_path, [*spec.columns, *spec.new_columns.names])
    return read_lines(spec.input_path)


def line_request(
    spec: BatchSpec, number: int, raw: Raw, request_id: str, *, is_repeated: bool = False
) -> LineRequest:
    """The request of a line; the client chooses an id if ``request_id`` is empty."""
    if isinstance(raw, BadLine):
        line: ParsedLine | BadLine = raw
    elif isinstance(raw, bytes | None):
        line = parse_line(number, raw)
    else:
        line = parse_row(spec, number, raw)
    if is_repeated and isinstance(line, ParsedLine):
        line = repeated(line.custom_id)
    if isinstance(line, BadLine):
        return LineRequest(number, line, _REFUSED)
    own: dict[str, Any] = {
        "model": spec.model,
        **line.options,
        "prompt": line.prompt,
        "params": spec.params | line.params,
    }
    if request_id:
        own["id"] = request_id
    return LineRequest(number, line, cast(FullPrompt, own))


@dataclass(frozen=True, slots=True)
class Pack:
    """Lines that share a request: inputs of a task that pools, or any one line."""

    lines: list[LineRequest]
    item: Item

    @property
    def request_id(self) -> str:
        """The id of the request; "" for an invalid line, which has none."""
        return "" if self.item == _REFUSED else cast(FullPrompt, self.item)["id"]

    def results(self, result: Result) -> list[Result]:
        """The result of each line."""
        return (
            split_result(result, len(self.lines)) if result.shapes else [result] * len(self.lines)
        )


def packs(lines: Iterable[LineRequest]) -> Iterator[Pack]:
    """Inputs of a task that pools, as many as share a request; an invalid line alone.

    They are of one block of numbers, and the id names the first, the last and their count: so a
    resumed job asks under the same ids what is not done of its requests.
    """
    for _, block in itertools.groupby(lines, lambda one: one.number // PACK_INPUTS):
        valid: list[LineRequest] = []
        for one in block:
            if isinstance(one.line, BadLine):
                yield Pack([one], one.item)
            else:
                valid.append(one)
        yield from map(_packed, in_packs(valid, _prompt_size, PACK_BYTES))


def _prompt_size(request: LineRequest) -> int:
    return content_size(cast(FullPrompt, request.item)["prompt"])


def _packed(lines: list[LineRequest]) -> Pack:
    first, last = (cast(dict[str, Any], lines[at].item) for at in (0, -1))
    shared = {
        "prompt": [cast(FullPrompt, one.item)["prompt"] for one in lines],
        "id": f"{first['id']}-{last['id']}x{len(lines)}",
    }
    return Pack(lines, cast(FullPrompt, first | shared))


def output_for(job: str, request: LineRequest, result: Result) -> OutputLine:
    """The output line for a result."""
    if isinstance(request.line, BadLine):
        return bad_line(job, request.number, request.line)
    return answer_line(job, request.number, request.line, result, clock.wall())
