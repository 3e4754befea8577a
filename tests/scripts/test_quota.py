"""Limits of a tenant: at the boundary, under concurrency, and given back when a request is over."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import pytest
import redis

from tests.scripts.test_tenants import TOKENS, dispatch, result
from tests.support.builders import make_request
from tests.support.yard import QueuedRequest, Yard
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Reply, Usage
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.wire import Request, SamplingParams
from tokenyard.scripts import (
    Acceptance,
    Charge,
    Dispatched,
    Move,
    Publication,
    Scripts,
    Submitted,
    Transfer,
    TransferAnswer,
    Transferred,
)

ACCEPTED, QUOTA = Submitted.ACCEPTED, Submitted.QUOTA
#: Tokens of a request of these tests, prompt and answer.
MOST = 20
EACH = TOKENS + MOST
#: A bucket of each window in ms, and the buckets that count.
WIDTH = {"tokens_per_minute": ("m", 5_000, 13), "tokens_per_day": ("d", 1_800_000, 49)}
WINDOWS = sorted(WIDTH)


def limit(yard: Yard, tenant: str = "acme", **limits: object) -> None:
    """Set the limits of a tenant."""
    yard.connection.hset(yard.keys.tenants, tenant, encode_tenant(TenantSettings(**limits)))


def ask(tenant: str = "acme", **fields: object) -> Request:
    params = fields.pop("params", SamplingParams(max_tokens=MOST))
    return make_request(tenant=tenant, tokens=range(TOKENS), params=params, **fields)


def submit(yard: Yard, count: int = 1, priority_class="normal") -> Sequence[Acceptance]:
    return yard.scripts.submit(priority_class, [ask() for _ in range(count)])


def accept(yard: Yard) -> QueuedRequest:
    """Submit one request, which must be accepted."""
    request = ask()
    [accepted] = yard.scripts.submit("normal", [request])
    assert accepted.code is ACCEPTED
    intake, _, entry = accepted.sid.partition("/")
    return QueuedRequest(request, intake, entry)


def codes(answers: Sequence[Acceptance]) -> list[Submitted]:
    return [answer.code for answer in answers]


def counted(yard: Yard, window: str) -> int:
    """The tokens that a window counts."""
    mark = WIDTH[window][0]
    fields = yard.connection.hgetall(yard.keys.tenant("acme"))
    rings = [
        text for name, text in fields.items() if name[:1] == mark.encode() and name[1:].isdigit()
    ]
    return sum(int(text.split()[1]) for text in rings)


def count(yard: Yard, window: str, age: int, tokens: int) -> int:
    """Count tokens in the bucket that is so many older than the current one; its number."""
    mark, width, size = WIDTH[window]
    seconds, micros = yard.connection.time()
    number = (seconds * 1000 + micros // 1000) // width - age
    yard.connection.hset(yard.keys.tenant("acme"), f"{mark}{number % size}", f"{number} {tokens}")
    return number


class TestBoundaries:
    @pytest.mark.parametrize(
        ("name", "most"),
        [("max_waiting_requests", 3), ("max_waiting_tokens", 3 * TOKENS)]
        + [(window, 3 * EACH) for window in WINDOWS],
    )
    @pytest.mark.parametrize("in_one_burst", [True, False])
    def test_exactly_as_many_are_accepted_as_fit(
        self, yard: Yard, name: str, most: int, in_one_burst: bool
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
        self, yard: Yard, name: str, most: int
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
        self, yard: Yard, limits: dict, admitted: dict, refused: dict
    ) -> None:
        limit(yard, **limits)
        answers = yard.scripts.submit("normal", [ask(**admitted), ask(**refused)])
        assert codes(answers) == [ACCEPTED, QUOTA]
        assert answers[1].limit == next(iter(limits))
        assert answers[1].retry_after_s is None

    def test_classes(self, yard: Yard) -> None:
        limit(yard, classes=["low", "normal"])
        answers = [submit(yard, 1, name)[0] for name in ("low", "normal", "high")]
        assert codes(answers) == [ACCEPTED, ACCEPTED, QUOTA]
        assert (answers[2].limit, answers[2].retry_after_s) == ("classes", None)

    @pytest.mark.parametrize("name", ["max_waiting_tokens", *WINDOWS])
    def test_a_request_larger_than_the_limit_is_told_not_to_come_back(
        self, yard: Yard, name: str
    ) -> None:
        limit(yard, **{name: TOKENS - 1})
        [answer] = submit(yard)
        assert (answer.limit, answer.retry_after_s) == (name, None)

    def test_each_choice_is_reserved(self, yard: Yard) -> None:
        limit(yard, tokens_per_minute=TOKENS + 4 * MOST)
        params = SamplingParams(max_tokens=MOST, n=4)
        answers = yard.scripts.submit("normal", [ask(params=params), ask()])
        assert codes(answers) == [ACCEPTED, QUOTA]

    def test_known_requests_are_known_at_the_limit_too(self, yard: Yard) -> None:
        limit(yard, max_waiting_requests=1)
        request = ask()
        answers = yard.scripts.submit("normal", [request, ask(), request])
        assert codes(answers) == [ACCEPTED, QUOTA, Submitted.KNOWN]

    def test_a_tenant_s_limit_stops_nobody_else(self, yard: Yard) -> None:
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
    def test_settings_that_cannot_be_read_limit_nothing(self, yard: Yard, settings: str) -> None:
        yard.connection.hset(yard.keys.tenants, "acme", settings)
        assert set(codes(submit(yard, 5))) == {ACCEPTED}

    def test_refusals_are_counted_for_operators(self, yard: Yard) -> None:
        limit(yard, max_waiting_requests=1)
        submit(yard, 3)
        fields = yard.connection.hgetall(yard.keys.tenant("acme"))
        assert fields[b"refused:max_waiting_requests"] == b"2"
        seconds, _ = yard.connection.time()
        assert abs(int(fields[b"refused_at:max_waiting_requests"]) / 1000 - seconds) < 10
        assert yard.connection.hget(yard.keys.tally, "count:QUOTA_EXCEEDED") == b"2"

    def test_a_full_yard_has_room_for_the_next_tenant(self, yard: Yard) -> None:
        """Given no limits at all, I expect a flood to leave as much as it takes."""
        yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 10)
        flood = codes(submit(yard, 20))
        assert flood.count(ACCEPTED) == 5
        assert set(flood[5:]) == {Submitted.FULL}
        assert codes(yard.scripts.submit("normal", [ask("other")])) == [ACCEPTED]


class TestWindows:
    @pytest.mark.parametrize("window", WINDOWS)
    def test_a_window_slides(self, yard: Yard, window: str) -> None:
        _, width, size = WIDTH[window]
        limit(yard, **{window: 100 + EACH - 1})
        # Given tokens that will have left the window with the next bucket,
        oldest = count(yard, window, size - 1, 100)
        [answer] = submit(yard)
        # I expect a refusal until then,
        assert answer.code is QUOTA
        seconds, micros = yard.connection.time()
        left_ms = (oldest + size) * width - (seconds * 1000 + micros // 1000)
        assert left_ms <= answer.retry_after_ms <= left_ms + 1000
        # and none once they have left.
        yard.connection.delete(yard.keys.tenant("acme"))
        count(yard, window, size, 100)
        assert codes(submit(yard)) == [ACCEPTED]

    def test_the_wait_is_until_enough_has_left(self, yard: Yard) -> None:
        limit(yard, tokens_per_minute=100)
        for age, tokens in ((12, 5), (6, 50), (1, 45)):
            newest = count(yard, "tokens_per_minute", age, tokens)
        [answer] = submit(yard)  # 30 tokens: the first two must leave
        seconds, micros = yard.connection.time()
        left_ms = (newest - 5 + 13) * 5_000 - (seconds * 1000 + micros // 1000)
        assert left_ms <= answer.retry_after_ms <= left_ms + 1000

    def test_both_windows_count(self, yard: Yard) -> None:
        limit(yard, tokens_per_minute=10 * EACH, tokens_per_day=2 * EACH)
        answers = submit(yard, 3)
        assert codes(answers) == [ACCEPTED, ACCEPTED, QUOTA]
        assert answers[2].limit == "tokens_per_day"
        assert [counted(yard, window) for window in WINDOWS] == [2 * EACH, 2 * EACH]

    @pytest.mark.parametrize("text", ["", "x", "1", "1 x", "-1 5", "1e5 9", "9" * 400 + " 1"])
    def test_invalid_buckets_count_nothing(self, yard: Yard, text: str) -> None:
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
        self, yard: Yard, params: SamplingParams, model: str, tokens: int
    ) -> None:
        defaults = {"long": {"max_tokens": 200}, "wide": {"n": 2}, "odd": {"max_tokens": "x"}}
        published = {"defaults": msgspec.json.encode(defaults), "default_model": "long"}
        yard.connection.hset(yard.keys.info, mapping=published)
        limit(yard, tokens_per_minute=10_000)
        yard.scripts.submit("normal", [ask(params=params, model=model)])
        assert counted(yard, "tokens_per_minute") == tokens

    @pytest.mark.parametrize("text", ["", "x", "[]", "7", '{"adder":7}', '{"adder":"x"}', "null"])
    def test_invalid_defaults_reserve_as_none(self, yard: Yard, text: str) -> None:
        yard.connection.hset(yard.keys.info, "defaults", text)
        limit(yard, tokens_per_minute=10_000, max_tokens=16)
        request = ask(params=SamplingParams(), model="adder")
        assert codes(yard.scripts.submit("normal", [request])) == [ACCEPTED]
        assert counted(yard, "tokens_per_minute") == TOKENS + 16

    def test_a_tenant_without_windows_has_none(self, yard: Yard) -> None:
        limit(yard, max_waiting_requests=5)
        waiting = accept(yard)
        assert counted(yard, "tokens_per_minute") == 0
        assert "reserved" not in yard.ledger(waiting.request)


@pytest.mark.parametrize("name", ["max_waiting_requests", *WINDOWS])
def test_simultaneous_submitters_never_exceed_a_limit(
    yard: Yard, connection: redis.Redis, name: str
) -> None:
    limit(yard, **{name: 10 if name == "max_waiting_requests" else 10 * EACH})
    begin, accepted = threading.Barrier(8), []

    def submitter() -> None:
        scripts = Scripts(connection, yard.keys)
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


def end_running(yard: Yard, worker: str, status: str, output: int) -> None:
    yard.scripts.finish(worker, [result(dispatch(yard, worker, accept(yard)), output, status)])


def used(yard: Yard, worker: str, how: str) -> int:
    """Let a request end in some way; the tokens that it has used."""
    match how:
        case "completed" | "failed" | "expired":
            end_running(yard, worker, how, 3)
            return TOKENS + 3
        case "more than reserved":  # its model has a default of its own
            end_running(yard, worker, "completed", 50)
            return TOKENS + 50
        case "cancelled while waiting":
            request = accept(yard).request
            yard.scripts.cancel(request.client, request.id, "enough")
            return 0
        case "cancelled while running":
            request = dispatch(yard, worker, accept(yard)).request
            yard.scripts.cancel(request.client, request.id, "enough")
            return TOKENS
        case "expired while waiting":
            yard.answer(accept(yard), Code.DEADLINE_EXCEEDED)
            return 0
        case "crashed and completed" | "crashed and cancelled":
            request = dispatch(yard, worker, accept(yard)).request
            yard.lose(worker)
            assert counted(yard, WINDOWS[0]) == EACH, "it is still reserved: it runs again"
            if how.endswith("cancelled"):
                yard.scripts.cancel(request.client, request.id, "enough")
                return 0
            again = yard.worker("again")
            placed = dispatch(yard, again, yard.waiting(request))
            yard.scripts.finish(again, [result(placed, 3)])
            return TOKENS + 3
    raise AssertionError(how)


@pytest.mark.parametrize(
    "how",
    [
        "completed",
        "failed",
        "expired",
        "more than reserved",
        "cancelled while waiting",
        "cancelled while running",
        "expired while waiting",
        "crashed and completed",
        "crashed and cancelled",
    ],
)
def test_what_was_reserved_is_given_back_at_the_end(yard: Yard, worker: str, how: str) -> None:
    limit(yard, tokens_per_minute=1000, tokens_per_day=5000, max_waiting_requests=2)
    tokens = used(yard, worker, how)
    assert [counted(yard, window) for window in WINDOWS] == [tokens, tokens]
    # Nothing waits any more, so two may.
    assert codes(submit(yard, 3)) == [ACCEPTED, ACCEPTED, QUOTA]


def test_a_repeated_result_gives_back_once(yard: Yard, worker: str) -> None:
    limit(yard, tokens_per_minute=1000)
    assignment = dispatch(yard, worker, accept(yard))
    for _ in range(2):
        yard.scripts.finish(worker, [result(assignment, 3)])
    assert counted(yard, "tokens_per_minute") == TOKENS + 3


@pytest.mark.parametrize("window", WINDOWS)
def test_what_was_reserved_before_the_window_is_not_given_back(
    yard: Yard, worker: str, window: str
) -> None:
    limit(yard, **{window: 1000})
    assignment = dispatch(yard, worker, accept(yard))
    # Once a later bucket has the place of that in which it was reserved,
    mark, _, size = WIDTH[window]
    counts = yard.keys.tenant("acme")
    for name, text in yard.connection.hgetall(counts).items():
        if name[:1] == mark.encode() and name[1:].isdigit():
            yard.connection.hset(counts, name, f"{int(text.split()[0]) + size} 500")
    # I expect what that counts to stay as it is.
    yard.scripts.finish(worker, [result(assignment, 3)])
    assert counted(yard, window) == 500


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 1",
        "1e99 1 acme",
        "-5 1 acme",
        "1 1 ../x",
        "9" * 300 + " 1 acme",
        "1 " + "9" * 90 + " acme",
        "999999999999999999 {now} acme",
        "5 {now} ",
    ],
)
def test_a_forged_reservation_breaks_nothing(yard: Yard, worker: str, text: str) -> None:
    limit(yard, tokens_per_minute=1000)
    assignment = dispatch(yard, worker, accept(yard))
    seconds, micros = yard.connection.time()
    ledger = yard.keys.ledger(assignment.request.client, assignment.request.id)
    yard.connection.hset(ledger, "reserved", text.format(now=seconds * 1000 + micros // 1000))
    usage = msgspec.json.encode(Usage(TOKENS, 3, TOKENS + 3, 0)).decode()
    reply = Reply(id=assignment.request.id, event="result", seq=0, tokens=b"", usage=usage)
    reply = msgspec.structs.replace(reply, status="completed")
    yard.scripts.finish(worker, [Publication(assignment, reply)])
    assert 0 <= counted(yard, "tokens_per_minute") <= EACH
    assert codes(submit(yard)) == [ACCEPTED]


def push(yard: Yard, name: str, **fields: str) -> QueuedRequest:
    """Write a request of the tenant by a plain XADD, 10 tokens and 20 to come."""
    params = '{"max_tokens":20}'
    entry = {"id": name, "prompt": "x" * 40, "tenant": "acme", "params": params, **fields}
    waiting = yard.push(entry, make_request(name, tenant="acme", prompt="x" * 40))
    yard.read()
    return waiting


def transfer(yard: Yard, *waiting: QueuedRequest) -> list[TransferAnswer]:
    entries = [Transfer(one.entry, "acme", "anon", one.request.id, "d") for one in waiting]
    return yard.scripts.transfer(yard.token, "normal", entries)


class TestPlainEntries:
    @pytest.mark.parametrize(
        ("name", "most"),
        [("max_waiting_requests", 2), ("max_waiting_tokens", 20), ("tokens_per_minute", 60)],
    )
    def test_as_many_are_moved_as_fit(self, yard: Yard, name: str, most: int) -> None:
        limit(yard, **{name: most})
        entries = [push(yard, f"q{number}") for number in range(3)]

        answers = transfer(yard, *entries)

        assert [one.code for one in answers] == [*[Transferred.MOVED] * 2, Transferred.QUOTA]
        assert answers[2].limit == name
        assert answers[2].retry_after_ms > 0
        # The refused one waits for its answer where it is.
        assert [entry for entry, _ in yard.intake("normal")] == [entries[2].entry]
        assert len(yard.intake("normal:acme")) == 2
        assert yard.answer(entries[2], Code.QUOTA_EXCEEDED).name == "DONE"

    def test_the_yards_bound_holds(self, yard: Yard) -> None:
        yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 4)
        answers = transfer(yard, *(push(yard, f"q{number}") for number in range(3)))
        assert [one.code for one in answers] == [*[Transferred.MOVED] * 2, Transferred.QUOTA]
        assert answers[2].limit == "max_num_queued_reqs"

    def test_what_they_ask_for_may_be_among_their_common_fields(self, yard: Yard) -> None:
        limit(yard, max_tokens=10)
        fields = {"id": "q", "prompt": "x", "tenant": "acme"}
        common = yard.push(
            {**fields, "common": '{"params":"{\\"max_tokens\\":11}"}'}, make_request("q")
        )
        plain = yard.push({**fields, "id": "r", "params": '{"max_tokens":10}'}, make_request("r"))
        answers = transfer(yard, common, plain)
        assert [one.code for one in answers] == [Transferred.QUOTA, Transferred.MOVED]
        assert answers[0].retry_after_s is None

    @pytest.mark.parametrize("how", ["completed", "cancelled"])
    def test_what_was_reserved_is_given_back(self, yard: Yard, worker: str, how: str) -> None:
        limit(yard, tokens_per_minute=100)
        [moved] = transfer(yard, push(yard, "q"))
        assert moved.code is Transferred.MOVED
        assert counted(yard, "tokens_per_minute") == 30
        [(entry, _)] = yard.intake("normal:acme")
        waiting = QueuedRequest(make_request("q"), "normal:acme", entry)
        if how == "completed":
            yard.scripts.finish(worker, [result(dispatch(yard, worker, waiting), 3)])
        else:
            yard.scripts.cancel("anon", "q", "enough")
        assert counted(yard, "tokens_per_minute") == (TOKENS + 3 if how == "completed" else 0)
        assert yard.queued_tokens() == 0

    def test_a_known_request_is_reserved_once(self, yard: Yard) -> None:
        limit(yard, tokens_per_minute=60)
        answers = transfer(yard, push(yard, "q"), push(yard, "q"))
        assert [one.code for one in answers] == [Transferred.MOVED] * 2
        assert counted(yard, "tokens_per_minute") == 30


class TestRunning:
    def test_no_more_run_than_may(self, yard: Yard, worker: str) -> None:
        limit(yard, max_running_requests=2)
        moves = [charged(accept(yard), worker) for _ in range(4)]

        held = [Dispatched.DISPATCHED] * 2 + [Dispatched.HELD] * 2
        assert yard.scripts.dispatch(yard.token, moves) == held
        assert len(yard.intake("normal:acme")) == 2
        # With each that ends, another may run.
        yard.scripts.finish(worker, [result(yard.lane(worker)[0])])
        assert yard.scripts.dispatch(yard.token, moves[2:]) == held[1:3]
        # Nobody else is held.
        [other] = yard.scripts.submit("normal", [make_request("o", tenant="other")])
        place = QueuedRequest(make_request("o"), "normal:other", other.sid.partition("/")[2])
        assert yard.scripts.dispatch(yard.token, [charged(place, worker, "other")]) == held[:1]

    @pytest.mark.parametrize("how", ["cancel", "lose", "hand_back"])
    def test_who_runs_no_more_makes_room(self, yard: Yard, worker: str, how: str) -> None:
        limit(yard, max_running_requests=1)
        running = dispatch(yard, worker, accept(yard))
        waiting, other = accept(yard), yard.worker("other")
        assert yard.scripts.dispatch(yard.token, [charged(waiting, other)]) == [Dispatched.HELD]
        if how == "cancel":
            yard.scripts.cancel(running.request.client, running.request.id, "enough")
        elif how == "lose":
            yard.lose(worker)
        else:
            yard.scripts.hand_back(worker, running, 0, "no memory")
        moved = yard.scripts.dispatch(yard.token, [charged(waiting, other)])
        assert moved == [Dispatched.DISPATCHED]

    def test_a_retry_is_not_held(self, yard: Yard, worker: str) -> None:
        limit(yard, max_running_requests=1)
        request = dispatch(yard, worker, accept(yard)).request
        yard.lose(worker)
        again = yard.worker("again")
        dispatch(yard, again, accept(yard))
        dispatch(yard, again, yard.waiting(request))
        assert len(yard.lane(again)) == 2


def charged(waiting: QueuedRequest, worker: str, tenant: str = "acme") -> Move:
    return msgspec.structs.replace(waiting.to(worker), charge=Charge(tenant, 1.0))
