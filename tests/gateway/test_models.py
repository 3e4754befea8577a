"""The models of a yard over HTTP: adapters, what is listed, and what their files say."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.gateway.asked import say
from tests.gateway.stand import Door, Stand
from tests.support.waiting import eventually
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, ServingInfo, encode_host

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]


def ask(http: httpx.Client, **body: Any) -> httpx.Response:
    usual = {"prompt": "75-48=", "max_tokens": 8, "temperature": 0}
    return http.post("/v1/completions", json=usual | body)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each event of a stream."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_an_adapter_is_asked_like_a_model(http: httpx.Client) -> None:
    texts = [
        ask(http, model=model).json()["choices"][0]["text"]
        for model in ("adder-subtracts", "subtractor")
    ]

    assert texts == ["27", "27"]


def test_a_listed_model_says_what_it_is_and_whether_it_is_warm(http: httpx.Client) -> None:
    assert ask(http, model="adder").status_code == 200

    listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
    adapter = http.get("/v1/models/adder-subtracts").json()

    assert listed["adder"]["max_model_len"] == 64
    assert (listed["adder"]["parent"], listed["adder"]["state"]) == (None, "warm")
    assert adapter == listed["adder-subtracts"]
    assert (adapter["parent"], adapter["state"]) == ("adder", "warm")
    assert http.get("/v1/models/nobody").status_code == 404


def test_a_salt_separates_prefix_caches_and_streams_tell_what_was_cached(
    http: httpx.Client,
) -> None:
    body = {"model": "speaker", "messages": say("abc" * 60), "max_tokens": 5, "stream": True}
    body["stream_options"] = {"include_usage": True}

    def cached(salt: str) -> tuple[int, int]:
        answer = http.post("/v1/chat/completions", json=body | {"cache_salt": salt})
        assert answer.status_code == 200, answer.text
        found = events(answer)[-1]["usage"]["prompt_tokens_details"]
        return found["cached_tokens"], found["created_cache_tokens"]

    block, none = (128, 0), (0, 128)
    assert [cached(salt) for salt in ("mine", "mine", "yours", "mine")] == [
        *(none, block, none, block),
    ]


def test_a_choice_that_ends_early_ends_before_the_others(http: httpx.Client) -> None:
    answer = ask(
        http,
        model="adder",
        n=4,
        seed=3,
        temperature=2.0,
        max_tokens=40,
        ignore_eos=True,
        stop_token_ids=[4],
        stream=True,
    )

    found = events(answer)
    ends = [
        (at, choice["index"])
        for at, event in enumerate(found)
        for choice in event["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(index for _, index in ends) == [0, 1, 2, 3]
    assert ends[0][0] < len(found) - 4, "not only with the result"


def test_a_model_that_is_not_here_is_told_apart_from_one_that_does_not_exist(
    stand: Stand, door: Door, http: httpx.Client
) -> None:
    # Given a host whose model lies at a path that this machine does not have
    gone = ModelInfo(name="gone", serving=ServingInfo(path="/nowhere/gone"))
    evil = ModelInfo(
        name="evil", serving=ServingInfo(path="/x", serve_args={"tool_parser_plugin": "/x.py"})
    )
    hosts: dict[Any, Any] = {
        "zz-other": encode_host(HostInfo(name="zz-other", models=[gone, evil])),
        "zz-bad": b"{",
    }
    stand.plant.connection.hset(stand.plant.keys.hosts, mapping=hosts)
    try:
        eventually(lambda: http.get("/v1/models/evil").status_code == 200)

        answers = {name: ask(http, model=name) for name in ("gone", "evil", "nobody")}

        assert [one.status_code for one in answers.values()] == [503, 503, 404]
        assert "--model-paths gone=PATH" in answers["gone"].json()["error"]["message"]
        assert "loads code" in answers["evil"].json()["error"]["message"]
        assert ask(http, model="adder", prompt="12+34=").json()["choices"][0]["text"] == "46"
    finally:
        stand.plant.connection.hdel(stand.plant.keys.hosts, *hosts)
