"""The OpenAPI document of the gateway's own endpoints."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.http.endpoints import router
from gateway.http.openapi import OpenApiDocument


@pytest.mark.parametrize("needs_key", [False, True])
def test_a_key_is_described_where_one_is_needed(needs_key: bool) -> None:
    written = asyncio.run(OpenApiDocument(router, needs_key=needs_key).read())
    document: dict[str, Any] = json.loads(written)

    assert ("security" in document) is needs_key
    assert document["paths"]["/livez"]["get"]["security"] == []


def test_a_refusal_is_described_once_for_all_statuses() -> None:
    document = json.loads(asyncio.run(OpenApiDocument(router, needs_key=False).read()))

    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["responses"].keys() == {"200", "default"}
