"""The OpenAPI document: every route is in it, and a key where one is needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.gateway.conftest import lone_gateway

pytestmark = pytest.mark.vllm


@pytest.mark.long
@pytest.mark.parametrize("needs_key", [False, True])
async def test_the_document(needs_key: bool) -> None:
    keys = "required" if needs_key else "off"
    async with lone_gateway(keys=keys, board=False) as (gateway, _):
        document: dict[str, Any] = json.loads(await gateway._openapi.read())

    assert ("/metrics" in document["paths"]) is not needs_key
    assert ("security" in document) is needs_key
    assert document["paths"]["/livez"]["get"]["security"] == []
    described = {
        (method.upper(), path): one
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    }
    served = {(one.method, one.path.replace(":path", "")) for one in gateway._router.routes}
    assert described.keys() == served
    for one in described.values():
        assert one["responses"].keys() == {"200", "default"}
        assert one["description"].endswith(".")
        assert one["tags"]
