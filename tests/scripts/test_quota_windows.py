"""The tokens that a tenant may use in a minute and in a day."""

from __future__ import annotations

import msgspec
import pytest

from tests.scripts.quota_rig import (
    ACCEPTED,
    EACH,
    QUOTA,
    WIDTH,
    WINDOWS,
    accept,
    ask,
    codes,
    counted,
    limit,
    submit,
)
from tests.scripts.tenant_rig import TOKENS
from tests.support.waiting import eventually
from tests.support.yard import PlayedYard
from tokenyard.protocol.wire import SamplingParams


def wait_for_time(yard: PlayedYard, window: str) -> None:
    """Wait until the current bucket lasts some seconds more."""
    width = WIDTH[window][1]
    eventually(lambda: width - yard.now_ms % width > 3000)


def count(yard: PlayedYard, window: str, age: int, tokens: int) -> int:
    """Count tokens in the bucket that is so many older than the current one; its number."""
    mark, width, size = WIDTH[window]
    number = yard.now_ms // width - age
    yard.connection.hset(yard.keys.tenant("acme"), f"{mark}{number % size}", f"{number} {tokens}")
    return number


class TestWindows:
    @pytest.mark.long
    @pytest.mark.parametrize("window", WINDOWS)
    def test_a_window_slides(self, yard: PlayedYard, window: str) -> None:
        _, width, size = WIDTH[window]
        limit(yard, **{window: 100 + EACH - 1})
        wait_for_time(yard, window)
        # Given tokens that will have left the window with the next bucket,
        leaves_ms = (count(yard, window, size - 1, 100) + size) * width
        before_ms = yard.now_ms
        [answer] = submit(yard)
        # I expect a refusal until then,
        assert answer.code is QUOTA
        assert leaves_ms - yard.now_ms <= answer.retry_after_ms <= leaves_ms - before_ms
        # and none once they have left.
        yard.connection.delete(yard.keys.tenant("acme"))
        count(yard, window, size, 100)
        assert codes(submit(yard)) == [ACCEPTED]

    def test_the_wait_is_until_enough_has_left(self, yard: PlayedYard) -> None:
        limit(yard, tokens_per_minute=100)
        wait_for_time(yard, "tokens_per_minute")
        for age, tokens in ((12, 5), (6, 50), (1, 45)):
            newest = count(yard, "tokens_per_minute", age, tokens)
        leaves_ms = (newest - 5 + 13) * 5_000
        before_ms = yard.now_ms
        [answer] = submit(yard)  # 30 tokens: the first two must leave
        assert leaves_ms - yard.now_ms <= answer.retry_after_ms <= leaves_ms - before_ms

    def test_both_windows_count(self, yard: PlayedYard) -> None:
        limit(yard, tokens_per_minute=10 * EACH, tokens_per_day=2 * EACH)
        answers = submit(yard, 3)
        assert codes(answers) == [ACCEPTED, ACCEPTED, QUOTA]
        assert answers[2].limit == "tokens_per_day"
        assert [counted(yard, window) for window in WINDOWS] == [2 * EACH, 2 * EACH]

    @pytest.mark.parametrize("text", ["", "x", "1", "1 x", "-1 5", "1e5 9", "9" * 400 + " 1"])
    def test_invalid_buckets_count_nothing(self, yard: PlayedYard, text: str) -> None:
        limit(yard, tokens_per_minute=EACH)
        fields = {f"m{number}": text for number in range(13)}
        yard.connection.hset(yard.keys.tenant("acme"), mapping=fields)
        assert codes(submit(yard, 2)) == [ACCEPTED, QUOTA]

    @pytest.mark.parametrize(
        ("params", "model", "tokens"),
        [
            (SamplingParams(), "adder", TOKENS + 16),
            (SamplingParams(), "long", TOKENS + 200),
            (SamplingParams(), "", TOKENS + 200),
            (SamplingParams(max_tokens=5), "long", TOKENS + 5),
            (SamplingParams(n=3), "long", TOKENS + 3 * 200),
            (SamplingParams(max_tokens=5), "wide", TOKENS + 2 * 5),
            (SamplingParams(max_tokens=None), "long", TOKENS + 512),
            (SamplingParams(), "odd", TOKENS + 16),
        ],
    )
    def test_what_a_request_does_not_say_is_reserved_by_its_models_defaults(
        self, yard: PlayedYard, params: SamplingParams, model: str, tokens: int
    ) -> None:
        defaults = {"long": {"max_tokens": 200}, "wide": {"n": 2}, "odd": {"max_tokens": "x"}}
        published = {"defaults": msgspec.json.encode(defaults), "default_model": "long"}
        yard.connection.hset(yard.keys.info, mapping=published)
        limit(yard, tokens_per_minute=10_000)
        yard.scripts.submit("normal", [ask(params=params, model=model)])
        assert counted(yard, "tokens_per_minute") == tokens

    @pytest.mark.parametrize("text", ["", "x", "[]", "7", '{"adder":7}', '{"adder":"x"}', "null"])
    def test_invalid_defaults_reserve_as_none(self, yard: PlayedYard, text: str) -> None:
        yard.connection.hset(yard.keys.info, "defaults", text)
        limit(yard, tokens_per_minute=10_000, max_tokens=16)
        request = ask(params=SamplingParams(), model="adder")
        assert codes(yard.scripts.submit("normal", [request])) == [ACCEPTED]
        assert counted(yard, "tokens_per_minute") == TOKENS + 16

    def test_a_task_that_pools_reserves_only_its_prompt(self, yard: PlayedYard) -> None:
        limit(yard, tokens_per_minute=10_000, max_tokens=1)
        request = ask(params=SamplingParams(), task="embed")
        assert codes(yard.scripts.submit("normal", [request])) == [ACCEPTED]
        assert counted(yard, "tokens_per_minute") == TOKENS

    def test_a_tenant_without_windows_has_none(self, yard: PlayedYard) -> None:
        limit(yard, max_waiting_requests=5)
        waiting = accept(yard)
        assert counted(yard, "tokens_per_minute") == 0
        assert "reserved" not in yard.ledger(waiting.request)
