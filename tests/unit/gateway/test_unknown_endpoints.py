"""What a client is told that asks for an endpoint that does not exist."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gateway.http.routes import Router, Routes

routes = Routes()


class Api:
    @routes("POST /v1/completions", "a")
    async def one(self, call: Any) -> None:
        """One."""

    @routes("POST /tokenize", "a")
    async def two(self, call: Any) -> None:
        """Two."""


ROUTER = Router()
ROUTER.add(routes, lambda name: cast(Any, getattr(Api(), name)))


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/completions", "did you mean /v1/completions?"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        *((path, "see GET /openapi.json") for path in ("/v1/embeddings", "/", "/v1/v1/tokenize")),
    ],
)
def test_the_error_names_the_endpoint_that_was_meant(path: str, hint: str) -> None:
    assert str(ROUTER.refusal("POST", path)) == f"there is no POST {path}; {hint}"
