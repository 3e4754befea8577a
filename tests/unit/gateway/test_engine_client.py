"""The gateway's `EngineClient` against vLLM's: a new member needs a decision."""

from __future__ import annotations

import inspect
from typing import Any

#: What vLLM's class does itself is right for a gateway, too, or is never called there: the engines
#: that these are for are the workers', which no gateway commands.
LEFT: frozenset[str] = frozenset(
    {
        "check_admission",
        "collective_rpc",
        "compute_weight_checksums",
        "finish_weight_update",
        "get_kv_event_sources",
        "get_status",
        "get_weight_version",
        "handle_fault",
        "init_weight_transfer_engine",
        "scale_elastic_ep",
        "shutdown_weight_transfer_engine",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weight_version",
        "update_weights",
    }
)


def members(kind: type[Any]) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_each_member_of_vllms_client_is_ours_or_left_on_purpose() -> None:
    from vllm.engine.protocol import EngineClient

    from gateway.frontend.engine_client import QueueEngineClient

    assert not QueueEngineClient.__abstractmethods__
    left = members(EngineClient) - members(QueueEngineClient)
    assert left == LEFT, f"decide on {sorted(left ^ LEFT)}"
    assert not members(QueueEngineClient) - members(EngineClient), "these are ours alone"


def test_calls_of_vllms_front_end_fit() -> None:
    from vllm.engine.protocol import EngineClient

    from gateway.frontend.engine_client import QueueEngineClient

    for name in members(EngineClient) & members(QueueEngineClient):
        theirs, ours = (
            inspect.getattr_static(one, name) for one in (EngineClient, QueueEngineClient)
        )
        assert type(theirs) is type(ours), name
        if isinstance(theirs, property):
            continue
        taken = inspect.signature(ours).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        for parameter in inspect.signature(theirs).parameters:
            assert parameter in taken or takes_any, f"{name}({parameter})"


def test_the_attributes_of_vllms_client_are_set() -> None:
    from vllm.engine.protocol import EngineClient

    from gateway.frontend.engine_client import QueueEngineClient

    made = inspect.getsource(QueueEngineClient.__init__)
    for name in EngineClient.__annotations__:
        assert f"self.{name} = " in made, name
