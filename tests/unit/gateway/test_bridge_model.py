"""The model of a bridge, from what the yard announces."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.bridge.model import NotAnnounced, ServedModel, find_model
from gateway.bridge.unit import _front_args
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import BridgeSettings
from tokenyard.protocol.worker_info import (
    HostInfo,
    ModelInfo,
    ServingInfo,
    WorkerInfo,
    encode_host,
    encode_worker,
)

NOWHERE = "redis://nowhere"
SERVING = ServingInfo(path="/m")


def found(*tasks: str, runner: str = "auto", length: int | None = 64, **given: Any) -> ServedModel:
    """The model "m", loaded by a worker that tells these tasks, if it tells any."""
    serving = ServingInfo(path="/m", max_model_len=length, serve_args={"runner": runner})
    host = HostInfo(name="a", models=[ModelInfo(name="m", serving=serving)])
    worker = WorkerInfo(name="w", state="ready", model="m" if tasks else "", tasks=list(tasks))
    settings = BridgeSettings(redis_url=NOWHERE, front="vllm", **given)
    return find_model({b"a": encode_host(host)}, {b"w.1": encode_worker(worker)}, settings)


@pytest.mark.parametrize(
    ("told", "task"),
    [
        ((), "generate"),
        (("generate",), "generate"),
        (("embed", "score"), "embed"),
        (("classify", "score"), "classify"),
        (("token_embed", "score"), "token_embed"),
        (("generate", "embed", "score"), "generate"),
    ],
)
def test_its_task_is_what_a_worker_tells(told: tuple[str, ...], task: str) -> None:
    assert found(*told).task == task


def test_vllm_serve_gets_the_arguments_that_a_front_end_needs_unless_they_are_given() -> None:
    pooler = {"use_activation": False}
    model = ServedModel(
        "m", "/m", 64, 0, "token_embed", {"pooler_config": pooler, "runner": "auto"}
    )

    def args(front: str, *given: str) -> list[str]:
        settings = BridgeSettings(redis_url=NOWHERE, front=front, front_args=given)  # type: ignore[arg-type]
        return _front_args(settings, model, 5)

    plain = args("vllm")
    assert plain[:2] == ["serve", "/m"]
    assert plain[plain.index("--pooler-config") + 1] == '{"use_activation": false}'
    assert plain[plain.index("--runner") + 1] == "pooling"
    assert "--no-enable-flash-late-interaction" in plain
    own = args("vllm", "/own", "--pooler-config={}", "--runner", "generate")
    assert own[:5] == ["serve", "/own", "--pooler-config={}", "--runner", "generate"]
    assert not {"--pooler-config", "pooling"} & {*own}
    assert not {"--pooler-config", "--runner"} & {*args("vllm-rs")}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"front": "vllm-rs"}, "vllm-rs has no tasks that pool"),
        ({"handshake": ("tcp://127.0.0.1:1",), "vllm_version": "0.31.0"}, "before 0.32"),
    ],
)
def test_what_cannot_pool_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        BridgeSettings(redis_url=NOWHERE, task="embed", **given)


def test_a_front_end_that_cannot_ask_for_the_task_that_a_worker_tells_is_refused() -> None:
    with pytest.raises(SettingsError, match="end with the first failure"):
        found("embed", vllm_version="0.31.0")


def test_until_a_worker_has_loaded_it_the_settings_say_more() -> None:
    with pytest.raises(NotAnnounced, match="no worker has loaded 'm' yet: give task"):
        found(runner="pooling")
    assert found(runner="pooling", task="embed").task == "embed"
    with pytest.raises(NotAnnounced, match="does not say: give max_model_len"):
        found(length=None)
    assert found(length=None, max_model_len=8).max_model_len == 8


def test_a_model_that_no_host_has_is_waited_for_and_one_of_several_is_named() -> None:
    with pytest.raises(NotAnnounced, match="no host announces the model 'n'"):
        found(model="n")
    hosts = HostInfo(name="a", models=[ModelInfo(name=one, serving=SERVING) for one in "mn"])
    with pytest.raises(SettingsError, match="model: give one of m, n"):
        find_model({b"a": encode_host(hosts)}, {}, BridgeSettings(redis_url=NOWHERE, front="vllm"))
