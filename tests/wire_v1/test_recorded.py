"""Bytes that version 1 wrote are read for ever, whatever the wire has grown since.

`recorded.json` was written once, by the code of the first release, and is never written again: a
case may be added, none may be changed. Each has the bytes (hex) and what they said. A decoded
value may have more fields by now; those that it had then must be as they were.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenyard.protocol.parse import parse_assignment, parse_request
from tokenyard.protocol.replies import decode_replies, decode_reply, to_delta, to_result
from tokenyard.protocol.worker_info import decode_worker

CASES = json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))


def decode(case: dict[str, Any]) -> Any:
    fields = {bytes.fromhex(n): bytes.fromhex(v) for n, v in case.get("fields", [])}
    packed = bytes.fromhex(case.get("packed", ""))
    match case["form"]:
        case "request":
            return parse_request(fields)
        case "assignment":
            return parse_assignment(case["entry"], fields)
        case "replies":
            return decode_replies(fields)
        case "ledger":
            return decode_reply(packed)
        case "worker":
            return decode_worker(packed)
        case form:
            raise AssertionError(form)


def assert_says(found: Any, recorded: Any) -> None:
    """``found`` has everything that was recorded, and may have more fields."""
    if isinstance(recorded, dict):
        for name, value in recorded.items():
            assert_says(found[name], value)
    elif isinstance(recorded, list):
        assert len(found) == len(recorded)
        for one, other in zip(found, recorded, strict=True):
            assert_says(one, other)
    else:
        assert found == recorded


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_bytes_of_version_1_say_what_they_said(case: dict[str, Any]) -> None:
    decoded = decode(case)

    # Through JSON, which writes binaries as base64, as they stand in the file.
    assert_says(json.loads(msgspec.json.encode(decoded)), case["expected"])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["form"] == "replies"], ids=lambda case: case["name"]
)
def test_recorded_replies_open_for_the_user(case: dict[str, Any]) -> None:
    for reply in decode(case):
        opened = to_delta(reply) if reply.event == "delta" else to_result(reply)
        assert opened.id == reply.id
