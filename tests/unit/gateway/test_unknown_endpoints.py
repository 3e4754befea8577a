"""What a client is told that asks for an endpoint that does not exist."""

from __future__ import annotations

import pytest

from gateway.app import meant_endpoint
from gateway.http.errors import no_endpoint


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/completions", "/v1/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/embeddings", ""),
        ("/", ""),
    ],
)
def test_a_base_url_with_one_v1_too_few_or_too_many_is_recognised(path: str, meant: str) -> None:
    assert meant_endpoint(path) == meant


def test_the_error_says_where_the_endpoints_are() -> None:
    assert str(no_endpoint("POST", "/x", "/v1/x")) == "there is no POST /x; did you mean /v1/x?"
    assert str(no_endpoint("GET", "/x")) == "there is no GET /x; see GET /openapi.json"
