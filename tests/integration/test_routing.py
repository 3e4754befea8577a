"""Policies on a real yard: what they learn, forget, and keep after a takeover."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.coordinator import Coordinator
from tests.support.builders import make_request
from tests.support.lanes import Lanes, requests
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.yard.timeline import read_timeline

LONG = SamplingParams(max_tokens=5_000)
SHORT = SamplingParams(max_tokens=10)


def lead(lanes: Lanes, policy: str, names: str = "ab", **values: Any) -> Coordinator:
    """Start workers, and a coordinator once all of them have joined."""
    for name in names:
        lanes.worker(name)
    return lanes.coordinator(expect_workers=len(names), policy=policy, **values)


def place(lanes: Lanes, request: Request) -> str:
    """Submit one request; the name of the worker that gets it."""
    lanes.push([request])
    ledger = lanes.keys.ledger("anon", request.id)
    eventually(lambda: lanes.connection.hexists(ledger, "worker"))
    worker = lanes.connection.hget(ledger, "worker")
    assert isinstance(worker, bytes)
    return worker.decode().rpartition(".")[0]


def why(lanes: Lanes, request_id: str) -> str:
    """The reason that `tokenyard explain` shows for the last attempt."""
    return read_timeline(lanes, "anon", request_id).attempts[-1].why


def prompt(first: int, count: int = 320) -> list[int]:
    return [first + at for at in range(count)]


class TestLeastLoaded:
    def test_a_long_request_counts_as_many_short_ones(self, lanes: Lanes) -> None:
        lead(lanes, "least_loaded")

        assert place(lanes, make_request("long", params=LONG)) == "a"
        short = [place(lanes, make_request(f"s{n}", params=SHORT)) for n in range(9)]

        assert set(short) == {"b"}
        assert why(lanes, "s1") == "least_loaded, load 1 of 1000, 13 tokens"

    def test_finished_requests_have_no_weight(self, lanes: Lanes) -> None:
        # Given a long request that is done, beside a short one on its worker
        a = lanes.worker("a")
        lanes.worker("b")
        lanes.coordinator(expect_workers=2, policy="least_loaded")
        assert place(lanes, make_request("long", params=LONG)) == "a"
        assert place(lanes, make_request("one", params=LONG)) == "b"
        assert place(lanes, make_request("two", params=SHORT)) == "a"
        lanes.finish(a, lanes.lane(a)[0])
        lanes.wait_for_load(a, 1)

        # I expect its worker to be the one with less to do, though both have one request.
        assert {place(lanes, make_request(f"n{n}", params=SHORT)) for n in range(5)} == {"a"}

    def test_a_new_leader_weighs_the_lanes(self, lanes: Lanes) -> None:
        # Given a leader that has placed a long request, and stops
        first = lead(lanes, "least_loaded", name="one")
        assert place(lanes, make_request("long", params=LONG)) == "a"
        first.stop()
        eventually(lambda: not lanes.connection.exists(lanes.keys.leader))

        # If another takes over
        lanes.coordinator(name="two", expect_workers=2, policy="least_loaded")

        # I expect it to spare that worker.
        assert {place(lanes, make_request(f"s{n}", params=SHORT)) for n in range(5)} == {"b"}


class TestPrefixAffinity:
    def test_a_prompt_follows_its_prefix(self, lanes: Lanes) -> None:
        # Given three conversations at three workers
        lead(lanes, "prefix_affinity", "abc")
        begun = {n: place(lanes, make_request(tokens=prompt(1000 * n))) for n in range(3)}
        assert len(set(begun.values())) == 3

        # I expect each to continue on its worker, in any order.
        for n in (2, 0, 1):
            assert place(lanes, make_request(f"q{n}", tokens=prompt(1000 * n, 480))) == begun[n]
        assert why(lanes, "q1") == (
            "prefix_affinity, 20 of 30 blocks of its prompt were there, load 1 of 1000"
        )

    @pytest.mark.parametrize("kind", ["prompt", "messages"])
    def test_text_has_prefixes_too(self, lanes: Lanes, kind: str) -> None:
        lead(lanes, "prefix_affinity")

        def ask(text: str) -> str:
            if kind == "prompt":
                return place(lanes, make_request(prompt=text))
            return place(lanes, make_request(messages=[{"role": "user", "content": text}]))

        begun = [ask(letter * 400) for letter in "xy"]

        assert sorted(begun) == ["a", "b"]
        assert [ask(letter * 400 + "more") for letter in "yx"] == begun[::-1]

    def test_a_session_stays_on_its_worker(self, lanes: Lanes) -> None:
        lead(lanes, "prefix_affinity")
        begun = [place(lanes, make_request(session=session)) for session in ("s", "t")]

        assert place(lanes, make_request("again", session="t")) == begun[1]
        assert place(lanes, make_request(session="s")) == begun[0]
        assert why(lanes, "again").startswith("prefix_affinity, its session was there, load 1")

    def test_a_worker_that_left_matches_nothing(self, lanes: Lanes) -> None:
        gone = lanes.worker("a")
        lanes.worker("b")
        lanes.coordinator(expect_workers=2, policy="prefix_affinity")
        assert place(lanes, make_request(session="s")) == "a"
        lanes.scripts.retire(gone, "left")

        assert place(lanes, make_request(session="s")) == "b"

    def test_a_new_leader_finds_the_prefixes_of_running_requests(self, lanes: Lanes) -> None:
        first = lead(lanes, "prefix_affinity", name="one")
        begun = {n: place(lanes, make_request(tokens=prompt(1000 * n))) for n in range(2)}
        first.stop()
        eventually(lambda: not lanes.connection.exists(lanes.keys.leader))

        lanes.coordinator(name="two", expect_workers=2, policy="prefix_affinity")

        for n in (1, 0):
            assert place(lanes, make_request(tokens=prompt(1000 * n, 480))) == begun[n]


@pytest.mark.parametrize(
    "policy", ["round_robin", "least_loaded", "prefix_affinity", "megatron", "vllm"]
)
def test_every_policy_fills_all_lanes_and_no_more(lanes: Lanes, policy: str) -> None:
    workers = [lanes.worker(name, lane_limit=limit) for name, limit in (("a", 3), ("b", 5))]
    lanes.coordinator(expect_workers=2, policy=policy)

    lanes.push(requests(20))

    for worker, limit in zip(workers, (3, 5), strict=True):
        lanes.wait_for_load(worker, limit)
    assert lanes.waiting() == 12
    assert len(lanes.serve(workers, 20)) == 20
