"""How long a client will wait."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from gateway.http.errors import GatewayError
from gateway.http.incoming import read_deadline

NOW_MS = 1_000_000.0


def given(header: str | None = None, **body: Any) -> int | None:
    headers = Headers({"x-request-timeout-ms": header} if header is not None else {})
    return read_deadline(headers, body, NOW_MS)


def test_without_one_there_is_no_deadline() -> None:
    assert given() is None
    assert given(timeout=None) is None


@pytest.mark.parametrize(("header", "body"), [("1500", {}), (None, {"timeout": 1.5})])
def test_header_and_field_say_the_same(header: str | None, body: dict[str, Any]) -> None:
    assert given(header, **body) == NOW_MS + 1500


def test_the_header_counts_before_the_field() -> None:
    assert given("1000", timeout=9999) == NOW_MS + 1000


@pytest.mark.parametrize("header", ["", "0", "-1", "1.5", "x", "9" * 30, "9" * 5000, "\xb2"])
def test_a_bad_header_is_refused(header: str) -> None:
    with pytest.raises(GatewayError, match="milliseconds") as refused:
        given(header)
    assert (refused.value.status, refused.value.param) == (400, "X-Request-Timeout-Ms")


@pytest.mark.parametrize("seconds", [0, -1, True, "5", [5], 1e300, float("nan"), float("inf")])
def test_a_bad_field_is_refused(seconds: Any) -> None:
    with pytest.raises(GatewayError) as refused:
        given(timeout=seconds)
    assert refused.value.param == "timeout"
