"""The memory of prefixes and sessions, and the features of requests for it."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.routing.policies import Match
from coordinator.routing.prefixes import BLOCK_TOKENS, MOST_SESSIONS, Cache, Prefixes
from coordinator.routing.queued_request import (
    MOST_BLOCKS,
    NO_FEATURES,
    RoutingFeatures,
    all_features,
)
from tests.support.builders import entry_fields, make_request
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import ChatOptions, Request, SamplingParams


def features(
    prompt: Any = None, *, session: str = "", client: str = "anon", model: str = ""
) -> RoutingFeatures:
    """The features of a request with so many tokens, this text, or these messages."""
    kinds = {int: "tokens", str: "prompt", list: "messages"}
    value: Any = list(range(prompt)) if isinstance(prompt, int) else prompt
    given: dict[str, Any] = {kinds[type(prompt)]: value}
    request = make_request(session=session, client=client, model=model, **given)
    sent = entry_fields(request)
    parsed = parse_request(sent)
    assert isinstance(parsed, Request)
    return all_features(parsed, sent)


def known(*workers: str, tokens: int = 0) -> Prefixes:
    prefixes = Prefixes()
    prefixes.follow({worker: Cache(tokens) for worker in workers})
    return prefixes


class TestHints:
    def test_the_same_chat_with_other_tools_has_another_prefix(self) -> None:
        """A chat template writes them before the messages."""
        messages = [{"role": "user", "content": "x" * 256}]
        chats = [ChatOptions(), ChatOptions(tools=[{"a": 1}]), ChatOptions(documents=[{"a": 1}])]

        seen = [all_features(make_request(messages=messages, chat=chat), {}) for chat in chats]

        assert len({features.blocks[0] for features in seen}) == 3
        assert list(seen[0].blocks) == list(features(messages).blocks)

    @pytest.mark.parametrize("prompt", ["a" * 999, [{"role": "user", "content": "x" * 256}]])
    def test_a_prompt_in_a_common_field_has_the_same_blocks(self, prompt: Any) -> None:
        kind = "prompt" if isinstance(prompt, str) else "messages"
        found = all_features(make_request(**{kind: prompt}), {b"common": b"{}"})

        assert len(found.blocks) > 2
        assert found == features(prompt)

    @pytest.mark.parametrize(
        ("short", "long"),
        [
            (4 * BLOCK_TOKENS, 9 * BLOCK_TOKENS),
            ("a" * 256, "a" * 999),
            (
                [{"role": "user", "content": "x" * 256}],
                [{"role": "user", "content": "x" * 256}, {"role": "assistant", "content": "y"}],
            ),
        ],
    )
    def test_a_longer_prompt_begins_with_the_blocks_of_its_prefix(
        self, short: Any, long: Any
    ) -> None:
        before, after = list(features(short).blocks), list(features(long).blocks)

        assert len(before) >= 4
        assert after[: len(before)] == before

    def test_the_hash_of_a_block_includes_all_blocks_before_it(self) -> None:
        one, other = features("a" * 64 + "b" * 64), features("c" * 64 + "b" * 64)

        assert set(one.blocks).isdisjoint(other.blocks)

    @pytest.mark.parametrize("field", ["model", "cache_salt", "tenant"])
    def test_adapters_salts_and_tenants_have_prefixes_of_their_own(self, field: str) -> None:
        found = [
            all_features(make_request(tokens=[1] * 64, **{field: value}), {}).blocks
            for value in ("", "acme", "evil")
        ]

        assert len({block for blocks in found for block in blocks}) == 3 * len(found[0])

    def test_a_prompt_shorter_than_a_block_has_no_blocks(self) -> None:
        assert not features(BLOCK_TOKENS - 1).blocks
        assert len(features(BLOCK_TOKENS).blocks) == 1

    def test_the_number_of_blocks_is_bounded(self) -> None:
        assert len(features(100_000).blocks) == MOST_BLOCKS

    def test_sessions_of_two_clients_differ(self) -> None:
        assert features("x", session="s").session != features("x", session="s", client="c").session
        assert features("x").session == 0

    def test_work_is_the_prompt_and_the_longest_answer(self) -> None:
        request = make_request(tokens=[1] * 100, params=SamplingParams(max_tokens=20, n=3))

        assert request.work == 160
        assert make_request(prompt="12345678").work == 2 + 16


class TestPrefixes:
    def test_a_worker_matches_longer_prompts_of_its_prefix(self) -> None:
        prefixes = known("a", "b")
        prefixes.note("a", features(64))

        found = prefixes.matches(["a", "b"], features(160))

        assert found == {"a": Match(4, 10, 1)}
        assert prefixes.matches(["b"], features(160)) == {}

    def test_a_session_belongs_to_its_last_worker(self) -> None:
        prefixes = known("a", "b")
        for worker in ("a", "b"):
            prefixes.note(worker, features("short", session="s"))

        assert prefixes.matches("ab", features("other", session="s")) == {
            "b": Match(has_session=True)
        }
        assert prefixes.matches("ab", features("other", session="t")) == {}
        assert prefixes.matches("ab", NO_FEATURES) == {}

    def test_prefixes_of_a_worker_that_left_are_forgotten(self) -> None:
        prefixes = known("a", "b")
        prefixes.note("a", features(64, session="s"))

        prefixes.follow({"b": Cache()})
        prefixes.follow({"a": Cache(), "b": Cache()})

        assert len(prefixes) == 0
        assert prefixes.matches("b", features(64, session="s")) == {}

    def test_prefixes_are_forgotten_with_new_weights(self) -> None:
        prefixes = known("a")
        prefixes.note("a", features(64))

        prefixes.follow({"a": Cache(weights="/step-2")})

        assert prefixes.matches("a", features(64)) == {}

    def test_no_more_blocks_are_remembered_than_the_cache_holds(self) -> None:
        # Given a cache of ten blocks, and a prompt of eight
        prefixes = known("a", tokens=10 * BLOCK_TOKENS)
        prefixes.note("a", features("x" * 8 * 64))

        # If another of eight comes
        prefixes.note("a", features("y" * 8 * 64))

        # I expect the older one to have lost its end, and the newer one nothing.
        assert len(prefixes) == 10
        assert prefixes.matches("a", features("x" * 8 * 64))["a"].blocks == 2
        assert prefixes.matches("a", features("y" * 8 * 64))["a"].blocks == 8

    def test_blocks_that_are_used_again_stay(self) -> None:
        prefixes = known("a", tokens=4 * BLOCK_TOKENS)
        for text in "xyxz":
            prefixes.note("a", features(text * 2 * 64))

        assert set(prefixes.matches("a", features("x" * 128))) == {"a"}
        assert prefixes.matches("a", features("y" * 128)) == {}

    def test_blocks_of_all_workers_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("coordinator.routing.prefixes.MOST_OF_ALL", 20)
        prefixes = known(*"abcd")
        for worker in "abcd":
            prefixes.note(worker, features("x" * 64 * 50))

        assert len(prefixes) == 20

    def test_sessions_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert MOST_SESSIONS > 10
        monkeypatch.setattr("coordinator.routing.prefixes.MOST_SESSIONS", 2)
        prefixes = known("a")
        for name in ("one", "two", "three"):
            prefixes.note("a", features("x", session=name))

        assert prefixes.matches("a", features("x", session="one")) == {}
        assert prefixes.matches("a", features("x", session="two"))

    def test_an_unknown_worker_is_not_remembered(self) -> None:
        prefixes = known()
        prefixes.note("a", features(64, session="s"))

        assert len(prefixes) == 0
        assert prefixes.matches("a", features(64, session="s")) == {}
