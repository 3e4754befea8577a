"""The lines of output files: results and errors in the form of the OpenAI batch API.

    {"id": "batch_req_<job>_<number>", "custom_id": ..., "response": {...}, "error": null}

``id`` names the line of the input, so the output files alone show which lines are done.
"""

from __future__ import annotations

import contextlib
import io
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
from msgspec import Struct

from tokenyard.batch.files import UnreadableFile, open_text
from tokenyard.batch.lines import BadLine, ParsedLine
from tokenyard.protocol.errors import SettingsError, http_status, http_type
from tokenyard.protocol.parse import BadJson, ForeignJson
from tokenyard.protocol.replies import Choice, ErrorInfo, Result

#: Codes of lines that were not run because the job ended. A resumed job runs them.
ENDED_CODES: Final = frozenset({"batch_cancelled", "batch_expired"})
_LINE_ID: Final = re.compile(r"batch_req_(?P<job>.+)_(?P<number>\d+)")


class LineError(Struct, frozen=True):
    """Why a line has no result."""

    code: str
    message: str
    line: int | None = None


class Response(Struct, frozen=True):
    """What an HTTP server would have answered."""

    status_code: int
    request_id: str
    body: dict[str, Any]


class OutputLine(Struct, frozen=True, kw_only=True):
    """One line of an output file."""

    id: str
    custom_id: str | None = None
    response: Response | None = None
    error: LineError | None = None


class DoneLine(Struct, frozen=True):
    """The part of an output line that identifies it."""

    id: str
    error: ErrorInfo | None = None


class _Answer(Struct, frozen=True):
    """The part of an answer that counts its tokens."""

    usage: dict[str, Any] | None = None


class _Answered(Struct, frozen=True):
    body: _Answer


class _ResultLine(Struct, frozen=True):
    response: _Answered


class LineOutcome(NamedTuple):
    """What an output line says of a line of the input."""

    job: str  # as `short` has it
    number: int
    code: str | None  # of its error
    tokens: tuple[int, int, int, int]  # of its result: in, of them cached, out, of them reasoning


_encode = msgspec.json.Encoder().encode
_decode_done = ForeignJson[DoneLine](DoneLine).decode
_decode_result = ForeignJson[_ResultLine](_ResultLine).decode


def encode_line(line: OutputLine) -> bytes:
    """A line with its newline."""
    return _encode(line) + b"\n"


def line_id(job: str, number: int) -> str:
    """The ``id`` of the output line for one line of a job's input."""
    return f"batch_req_{short(job)}_{number}"


def short(job: str) -> str:
    """The part of a job's id that the ids of its lines contain."""
    return job.removeprefix("batch_")


def read_line_number(raw: bytes) -> int:
    """The number of the input line in an output line of a job's own files."""
    return int(_decode_done(raw).id.rpartition("_")[2])


def read_done(raw: bytes) -> LineOutcome | None:
    """What an output line says; None if it is not one."""
    try:
        done = _decode_done(raw)
    except BadJson:
        return None
    found = _LINE_ID.fullmatch(done.id)
    if found is None:
        return None
    code = done.error.code if done.error else None
    return LineOutcome(found["job"], int(found["number"]), code, (0,) * 4 if code else _tokens(raw))


def _tokens(raw: bytes) -> tuple[int, int, int, int]:
    """The tokens of a result, by the names of any endpoint; zeros where it does not tell them."""
    try:
        usage = _decode_result(raw).response.body.usage or {}
    except BadJson:
        return 0, 0, 0, 0

    def count(fields: Mapping[str, Any], *names: str) -> int:
        return next((n for name in names if type(n := fields.get(name)) is int and n > 0), 0)

    def details(*names: str) -> Mapping[str, Any]:
        return next((one for name in names if isinstance(one := usage.get(name), dict)), usage)

    return (
        count(usage, "prompt_tokens", "input_tokens"),
        count(details("prompt_tokens_details", "input_tokens_details"), "cached_tokens"),
        count(usage, "completion_tokens", "output_tokens"),
        count(details("completion_tokens_details", "output_tokens_details"), "reasoning_tokens"),
    )


def bad_line(job: str, number: int, bad: BadLine) -> OutputLine:
    """The output for an invalid line."""
    error = LineError(bad.code, bad.message, number)
    return OutputLine(id=line_id(job, number), custom_id=bad.custom_id, error=error)


def unrun_line(job: str, number: int, custom_id: str | None, code: str) -> OutputLine:
    """The output for a line that has no result because the job ended."""
    ended = "was cancelled" if code == "batch_cancelled" else "ran out of its completion window"
    error = LineError(code, f"the job {ended} before this line had a result", number)
    return OutputLine(id=line_id(job, number), custom_id=custom_id, error=error)


def answer_line(
    job: str, number: int, line: ParsedLine, result: Result, now_s: float
) -> OutputLine:
    """The output for a line that was run, successful or not."""
    name = line_id(job, number)
    if result.ok:
        response = Response(200, result.id, _body(name, line, result, int(now_s)))
        return OutputLine(id=name, custom_id=line.custom_id, response=response)
    error = result.error or ErrorInfo(result.status, "the request did not complete")
    status = http_status(error.code)
    body = {
        "error": {
            "message": error.message,
            "type": http_type(status),
            "param": None,
            "code": error.code,
        },
    }
    return OutputLine(
        id=name,
        custom_id=line.custom_id,
        response=Response(status, result.id, body),
        error=LineError(error.code, error.message, number),
    )


def _body(name: str, line: ParsedLine, result: Result, created: int) -> dict[str, Any]:
    if line.form == "row":
        return _row_body(result)
    is_chat = line.form == "chat"
    choice = _chat_choice if is_chat else _completion_choice
    body: dict[str, Any] = {
        "id": name.replace("batch_req", "chatcmpl" if is_chat else "cmpl", 1),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": result.provenance.model if result.provenance else "",
        "choices": [choice(each, line) for each in result.all_choices],
        "usage": result.usage,
    }
    if result.prompt_logprobs is not None:
        body["prompt_logprobs"] = result.prompt_logprobs
    if result.provenance is not None:
        body["provenance"] = result.provenance
    return body


def _row_body(result: Result) -> dict[str, Any]:
    """The answer to a row of a table; numbers as base64."""
    if result.shapes is None:
        return {"text": result.text, "usage": result.usage}
    return {"data": result.data, "shape": result.shapes[0], "usage": result.usage}


def _chat_choice(choice: Choice, _: ParsedLine) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text or ""},
        "logprobs": _chat_logprobs(choice.logprobs) if choice.logprobs is not None else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _completion_choice(choice: Choice, line: ParsedLine) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text or "",
        "logprobs": _completion_logprobs(choice.logprobs) if choice.logprobs is not None else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if line.wants_tokens or choice.text is None:
        answer["token_ids"] = choice.tokens
    return answer


def _name(entry: Mapping[str, Any]) -> str:
    """A token as text, or as vLLM names one that is not text by itself."""
    decoded = entry.get("decoded")
    return decoded if decoded is not None else f"token_id:{entry.get('token')}"


def _chat_logprobs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def plain(entry: Mapping[str, Any]) -> dict[str, Any]:
        name = _name(entry)
        return {"token": name, "logprob": entry.get("logprob"), "bytes": list(name.encode())}

    content = [
        {**plain(entry), "top_logprobs": [plain(each) for each in entry.get("top", ())]}
        for entry in entries
    ]
    return {"content": content}


def _completion_logprobs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = [_name(entry) for entry in entries]
    offsets = [0]
    for name in names[:-1]:
        offsets.append(offsets[-1] + len(name))
    return {
        "tokens": names,
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            {_name(each): each.get("logprob") for each in entry.get("top", ())} for entry in entries
        ],
        "text_offset": offsets[: len(names)],
    }


# The errors of a job by line, from the beginning of its file of errors.
#
# Its path comes from RQ, which is not trusted: only lines that are errors of a batch are ever
# shown, and only so much of a regular file is read.

_MOST_BYTES: Final = 1024 * 1024
_PIECE: Final = 64 * 1024


class FailedLine(Struct, frozen=True):
    """A line of the input without a result."""

    error: LineError
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class LineErrors:
    """The first errors of a job."""

    lines: Sequence[FailedLine]
    is_whole: bool  # False: the file has more, or cannot be read further
    problem: str = ""  # why it cannot be read


_decode_failed = ForeignJson[FailedLine](FailedLine).decode


def read_line_errors(path: Path, most: int = 100) -> LineErrors:
    """The first errors in a job's file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return LineErrors((), is_whole=False, problem="it is no regular file")
    except (OSError, ValueError):
        return LineErrors((), is_whole=False, problem="it is not there, or not on this host")
    text, problem = _beginning(path)
    is_cut = len(text) > _MOST_BYTES or bool(problem)
    raw_lines = text[:_MOST_BYTES].splitlines()
    if is_cut and raw_lines:
        raw_lines.pop()  # it may be torn
    found = []
    for raw in raw_lines:
        with contextlib.suppress(BadJson):
            found.append(_decode_failed(raw))
    return LineErrors(found[:most], is_whole=not is_cut and len(found) <= most, problem=problem)


def _beginning(path: Path) -> tuple[bytes, str]:
    """The first bytes of its text, decompressed, and why there are not more."""
    text = bytearray()
    try:
        with open_text(path) as file:
            # In single reads, so that an error loses nothing that was read before.
            pieces = cast(io.BufferedReader, file)
            while len(text) <= _MOST_BYTES and (piece := pieces.read1(_PIECE)):
                text += piece
    except UnreadableFile:
        return bytes(text), "the rest of it is not written yet, or corrupt"
    except (OSError, SettingsError) as error:
        return bytes(text), f"it cannot be read: {error}"
    return bytes(text), ""
