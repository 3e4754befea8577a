"""Limits of a tenant, at the boundary and under concurrency."""

from __future__ import annotations

import threading

import pytest
import redis

from tests.scripts.quota_rig import ACCEPTED, EACH, MOST, QUOTA, WINDOWS, ask, codes, limit, submit
from tests.scripts.tenant_rig import TOKENS
from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.protocol.keys import TENANT_CAME, TENANTS_QUEUED_TOKENS, Yard
from tokenyard.protocol.wire import SamplingParams
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Submitted
from tokenyard.yard.tenants import read_tenants


class TestBoundaries:
    @pytest.mark.parametrize(
        ("name", "most"),
        [("max_waiting_requests", 3), ("max_waiting_tokens", 3 * TOKENS)]
        + [(window, 3 * EACH) for window in WINDOWS],
    )
    @pytest.mark.parametrize("in_one_burst", [True, False])
    def test_exactly_as_many_are_accepted_as_fit(
        self, yard: PlayedYard, name: str, most: int, in_one_burst: bool
    ) -> None:
        limit(yard, **{name: most})

        answers = (
            submit(yard, 4) if in_one_burst else [submit(yard)[0], *submit(yard, 2), *submit(yard)]
        )

        assert codes(answers) == [ACCEPTED] * 3 + [QUOTA]
        assert answers[3].limit == name
        assert answers[3].retry_after_ms > 0
        # One token more, and it would have been the fourth's turn, too.
        limit(yard, **{name: most + most // 3})
        assert codes(submit(yard, 2)) == [ACCEPTED, QUOTA]

    @pytest.mark.parametrize(
        ("name", "most"),
        [("max_waiting_tokens", 3 * TOKENS - 1), *((w, 3 * EACH - 1) for w in WINDOWS)],
    )
    def test_a_request_that_is_one_token_too_large_is_refused(
        self, yard: PlayedYard, name: str, most: int
    ) -> None:
        limit(yard, **{name: most})
        assert codes(submit(yard, 3)) == [ACCEPTED, ACCEPTED, QUOTA]

    @pytest.mark.parametrize(
        ("limits", "admitted", "refused"),
        [
            ({"max_tokens": 5}, {"params": SamplingParams(max_tokens=5)}, {}),
            (
                {"max_tokens": 30},
                {},
                {"params": SamplingParams(max_tokens=None)},  # as many as the model allows
            ),
            ({"models": ["a", "b"]}, {"model": "b"}, {"model": "c"}),
            ({"models": ["a"]}, {"model": "a"}, {"model": ""}),
        ],
    )
    def test_a_request_that_no_time_admits_is_told_so(
        self, yard: PlayedYard, limits: dict, admitted: dict, refused: dict
    ) -> None:
        limit(yard, **limits)
        answers = yard.scripts.submit("normal", [ask(**admitted), ask(**refused)])
        assert codes(answers) == [ACCEPTED, QUOTA]
        assert answers[1].limit == next(iter(limits))
        assert answers[1].retry_after_s is None

    def test_classes(self, yard: PlayedYard) -> None:
        limit(yard, classes=["low", "normal"])
        answers = [submit(yard, 1, name)[0] for name in ("low", "normal", "high")]
        assert codes(answers) == [ACCEPTED, ACCEPTED, QUOTA]
        assert (answers[2].limit, answers[2].retry_after_s) == ("classes", None)

    @pytest.mark.parametrize("name", ["max_waiting_tokens", *WINDOWS])
    def test_a_request_larger_than_the_limit_is_told_not_to_come_back(
        self, yard: PlayedYard, name: str
    ) -> None:
        limit(yard, **{name: TOKENS - 1})
        [answer] = submit(yard)
        assert (answer.limit, answer.retry_after_s) == (name, None)

    def test_each_choice_is_reserved(self, yard: PlayedYard) -> None:
        limit(yard, tokens_per_minute=TOKENS + 4 * MOST)
        params = SamplingParams(max_tokens=MOST, n=4)
        answers = yard.scripts.submit("normal", [ask(params=params), ask()])
        assert codes(answers) == [ACCEPTED, QUOTA]

    def test_known_requests_are_known_at_the_limit_too(self, yard: PlayedYard) -> None:
        limit(yard, max_waiting_requests=1)
        request = ask()
        answers = yard.scripts.submit("normal", [request, ask(), request])
        assert codes(answers) == [ACCEPTED, QUOTA, Submitted.KNOWN]

    def test_a_tenant_s_limit_stops_nobody_else(self, yard: PlayedYard) -> None:
        limit(yard, max_waiting_requests=1)
        assert codes(submit(yard, 2)) == [ACCEPTED, QUOTA]
        for other in ("other", ""):
            assert codes(yard.scripts.submit("normal", [ask(other)])) == [ACCEPTED]

    @pytest.mark.parametrize(
        "settings",
        [
            "",
            "no JSON",
            "[]",
            "7",
            "null",
            '{"max_waiting_requests":"1"}',
            '{"models":7}',
            "{" * 99,
            '{"max_waiting_requests":null}',
            '{"tokens_per_minute":-1}',
            '{"max_tokens":{}}',
        ],
    )
    def test_settings_that_cannot_be_read_limit_nothing(
        self, yard: PlayedYard, settings: str
    ) -> None:
        yard.connection.hset(yard.keys.tenants, "acme", settings)
        assert set(codes(submit(yard, 5))) == {ACCEPTED}

    def test_refusals_are_counted_for_operators(self, yard: PlayedYard) -> None:
        limit(yard, max_waiting_requests=1)
        submit(yard, 3)
        fields = yard.connection.hgetall(yard.keys.tenant("acme"))
        assert fields[b"refused:max_waiting_requests"] == b"2"
        seconds, _ = yard.connection.time()
        assert abs(int(fields[b"refused_at:max_waiting_requests"]) / 1000 - seconds) < 10
        assert yard.connection.hget(yard.keys.tally, "count:QUOTA_EXCEEDED") == b"2"

    def test_refusals_are_counted_by_the_hour(self, yard: PlayedYard) -> None:
        limit(yard, max_waiting_requests=1)
        seconds, _ = yard.connection.time()
        hour = seconds // 3600
        ring = [f"refused:max_waiting_requests:{number}" for number in range(2)]

        # Given refusals of the hour before, of hours long ago, or something that is no count
        for text, others in ((f"{hour - 1} 7", 7), (f"{hour - 9} 7", 0), ("x", 0), ("", 0)):
            yard.connection.delete(yard.keys.tenant("acme"))
            for name in ring:
                yard.connection.hset(yard.keys.tenant("acme"), name, text)
            submit(yard, 4)
            submit(yard, 1)

            # I expect those of now to be added to this hour's, and what is old not to count.
            (one,) = read_tenants(yard, ["acme"])
            if yard.connection.time()[0] // 3600 == hour:
                (refused,) = one.refused.values()
                assert one.refused_lately == {"max_waiting_requests": refused + others}

    def test_a_full_yard_has_room_for_the_next_tenant(self, yard: PlayedYard) -> None:
        """Given no limits at all, I expect a flood to leave as much as it takes."""
        yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 10)
        flood = codes(submit(yard, 20))
        assert flood.count(ACCEPTED) == 5
        assert set(flood[5:]) == {Submitted.FULL}
        assert codes(yard.scripts.submit("normal", [ask("other")])) == [ACCEPTED]


class TestRequestsWithoutATenant:
    """Together they leave as much as they take, where there are tenants."""

    def flood(self, yard: PlayedYard, count: int = 20, tokens: int = 10) -> int:
        wanted = [make_request(tokens=range(tokens)) for _ in range(count)]
        answers = codes(yard.scripts.submit("normal", wanted))
        return answers.count(ACCEPTED)

    def test_without_tenants_they_have_the_whole_queue(self, yard: PlayedYard) -> None:
        yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 10)
        assert self.flood(yard) == 10

    @pytest.mark.parametrize(
        ("limit", "most"), [("max_num_queued_reqs", 10), ("max_num_queued_tokens", 100)]
    )
    def test_a_yard_with_tenants_has_room_for_the_next(
        self, yard: PlayedYard, limit: str, most: int
    ) -> None:
        yard.connection.hset(yard.keys.info, mapping={limit: most, "has_tenants": 1})
        assert self.flood(yard) == 5
        assert self.flood(yard) == 0
        assert codes(submit(yard, 1)) == [ACCEPTED]

    @pytest.mark.parametrize(
        ("limit", "most"), [("max_num_queued_reqs", 20), ("max_num_queued_tokens", 200)]
    )
    def test_beside_one_who_waits_they_have_half_of_the_rest(
        self, yard: PlayedYard, limit: str, most: int
    ) -> None:
        yard.connection.hset(yard.keys.info, limit, most)
        assert codes(submit(yard, 30)).count(ACCEPTED) == 10
        assert self.flood(yard) == 5
        assert codes(yard.scripts.submit("normal", [ask("other")])) == [ACCEPTED]

    def test_a_class_is_bounded_in_the_same_way(self, yard: PlayedYard) -> None:
        told = {"max_num_queued_reqs": 20, "max_low_share": 0.5, "has_tenants": 1}
        yard.connection.hset(yard.keys.info, mapping=told)
        wanted = [make_request() for _ in range(20)]
        assert codes(yard.scripts.submit("low", wanted)).count(ACCEPTED) == 5

    @pytest.mark.parametrize("is_full", [False, True])
    def test_it_is_noted_when_a_tenant_came(self, yard: PlayedYard, is_full: bool) -> None:
        """Also if it found no room: then the leader tells the others, and there will be some."""
        yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 2)
        assert self.flood(yard, 2 if is_full else 1) == (2 if is_full else 1)
        assert yard.connection.hget(yard.keys.tally, TENANT_CAME) is None
        assert codes(submit(yard, 1)) == [Submitted.FULL if is_full else ACCEPTED]
        seconds, _ = yard.connection.time()
        came_ms = int(yard.connection.hget(yard.keys.tally, TENANT_CAME))
        assert abs(came_ms / 1000 - seconds) < 60

    def test_a_count_of_those_who_are_gone_begins_at_0(self, yard: PlayedYard) -> None:
        yard.connection.hset(yard.keys.tally, TENANTS_QUEUED_TOKENS, 999)
        submit(yard, 1)
        assert yard.connection.hget(yard.keys.tally, TENANTS_QUEUED_TOKENS) == b"10"


@pytest.mark.parametrize("name", ["max_waiting_requests", *WINDOWS])
def test_simultaneous_submitters_never_exceed_a_limit(
    yard: PlayedYard, connection: redis.Redis, name: str
) -> None:
    limit(yard, **{name: 10 if name == "max_waiting_requests" else 10 * EACH})
    begin, accepted = threading.Barrier(8), []

    def submitter() -> None:
        scripts = Scripts(Yard(connection, yard.keys))
        begin.wait()
        for _ in range(10):
            accepted.extend(scripts.submit("normal", [ask()]))

    threads = [threading.Thread(target=submitter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes(accepted).count(ACCEPTED) == 10
    assert codes(accepted).count(QUOTA) == 70
