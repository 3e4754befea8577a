"""The OpenAPI document: every endpoint that is counted is in it, and a key where one is needed."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from gateway.http.errors import methods_of
from tests.unit.gateway.conftest import adder_tokenizer

pytestmark = pytest.mark.vllm


@pytest.mark.long
@pytest.mark.parametrize("needs_key", [False, True])
def test_the_document(needs_key: bool) -> None:
    adder_tokenizer()  # sets vLLM's environment first
    from gateway.app import BOARD, ENDPOINTS
    from gateway.http.openapi import OpenApiDocument

    document: dict[str, Any] = json.loads(asyncio.run(OpenApiDocument(needs_key=needs_key).read()))

    assert document["paths"].keys() >= ENDPOINTS - {BOARD}
    assert ("/metrics" in document["paths"]) is not needs_key
    assert ("security" in document) is needs_key
    assert document["paths"]["/livez"]["get"]["security"] == []
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["responses"].keys() == {"200", "default"}
    for path, operations in document["paths"].items():
        allowed = methods_of(re.sub("{[a-z_]+}", "x", path))
        assert allowed.split(", ") == sorted(
            map(str.upper, operations), key="GET POST DELETE".index
        )
