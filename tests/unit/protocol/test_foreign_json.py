"""Whatever is wrong with foreign JSON is one error."""

from __future__ import annotations

from typing import Any

import pytest

from tokenyard.protocol.parse import BadJson, ForeignJson


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b'{"a":"\xff"}',
        b"1",
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000,
        b'{"a":NaN}',
        b'{"a":"\\ud800"}',
        b'{"a":1e999}',
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_bad_json_is_named(raw: bytes) -> None:
    with pytest.raises(BadJson, match=r"."):
        ForeignJson[dict[str, Any]](dict[str, Any]).decode(raw)


def test_good_json_is_read() -> None:
    assert ForeignJson[dict[str, int]](dict[str, int]).decode('{"a":1}') == {"a": 1}
