"""What a tenant pays and what is counted for it, however its request ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import redis
from msgspec import structs

from tests.scripts.tenant_rig import (
    TOKENS,
    counts,
    dispatch,
    generated,
    line,
    result,
    service,
    submit,
    usage,
)
from tests.scripts.test_headers import LUA
from tests.support.yard import PlayedYard
from tokenyard.ops.letters import requeue_letters
from tokenyard.protocol.wire import Assignment, pack_tokens
from tokenyard.scripts.answers import Answered, Cancelled, HandedBack, Published
from tokenyard.yard.letters import dead_letters


class TestFinish:
    def test_charge_is_settled_by_what_was_used(self, yard: PlayedYard, worker: str) -> None:
        assignment = dispatch(yard, worker, submit(yard), amount=100)
        submit(yard)

        assert yard.scripts.finish(worker, [result(assignment, 3)]) == [Published.PUBLISHED]

        assert service(yard) == TOKENS + 2 * 3
        assert line(yard)["acme"] == 100 + TOKENS + 2 * 3 - 100
        assert "running" not in counts(yard)
        assert usage(yard) == {
            "adder requests": 1,
            "adder in": TOKENS,
            "adder cached": 4,
            "adder out": 3,
        }

    def test_repeated_result_is_paid_once(self, yard: PlayedYard, worker: str) -> None:
        assignment = dispatch(yard, worker, submit(yard))
        yard.scripts.finish(worker, [result(assignment)])
        before = service(yard), usage(yard)

        assert yard.scripts.finish(worker, [result(assignment)]) == [Published.REPEATED]

        assert (service(yard), usage(yard)) == before

    def test_failures_are_counted_by_code(self, yard: PlayedYard, worker: str) -> None:
        codes = ["WORKER_LOST", "WORKER_LOST", "INFERENCE_ERROR", "odd <code>", ""]
        ends = [
            result(dispatch(yard, worker, submit(yard)), status="failed", code=code)
            for code in codes
        ]
        ends.append(result(dispatch(yard, worker, submit(yard)), status="completed"))

        yard.scripts.finish(worker, ends)

        found = {name: count for name, count in usage(yard).items() if "failed" in name}
        assert found == {
            "adder failed": 5,
            "adder failed:WORKER_LOST": 2,
            "adder failed:INFERENCE_ERROR": 1,
            "adder failed:UNKNOWN": 2,
        }


class TestGivenBack:
    @pytest.mark.parametrize("how", ["hand_back", "rescue"])
    def test_charge_is_given_back(self, yard: PlayedYard, worker: str, how: str) -> None:
        assignment = dispatch(yard, worker, submit(yard))

        if how == "hand_back":
            back = yard.scripts.hand_back(worker, assignment, 0, "no memory")
            assert back is HandedBack.HANDED_BACK
        else:
            assert yard.lose(worker) == 0

        assert service(yard) == 0
        assert counts(yard) == {}
        again = yard.worker("again")
        yard.place(yard.waiting(assignment.request), again)


class TestCancel:
    def test_waiting_request_leaves_the_line(self, yard: PlayedYard) -> None:
        waiting = submit(yard)

        code = yard.scripts.cancel(waiting.request.client, waiting.request.id, "enough")

        assert code is Cancelled.CANCELLED
        assert line(yard) == counts(yard) == {}
        assert usage(yard) == {" requests": 1, " cancelled": 1}

    def test_running_request_keeps_its_estimate_until_its_worker_reports(
        self, yard: PlayedYard, worker: str
    ) -> None:
        assignment = cancelled(yard, worker, [7, 8])

        assert service(yard) == 100
        assert counts(yard) == {}
        assert usage(yard) == {"adder requests": 1, "adder cancelled": 1, "adder out": 2}
        (told,) = yard.connection.xrange(yard.keys.lane(worker))
        name = f"{assignment.request.client}/{assignment.request.id}".encode()
        assert told[1] == {b"cancel": assignment.entry.encode(), b"request": name}

    def test_request_without_a_charge_is_not_reported(self, yard: PlayedYard, worker: str) -> None:
        assignment = yard.assign(worker)

        yard.scripts.cancel(assignment.request.client, assignment.request.id, "enough")

        (told,) = yard.connection.xrange(yard.keys.lane(worker))
        assert told[1] == {b"cancel": assignment.entry.encode()}
        ledger = yard.ledger(assignment.request)
        assert "used" not in ledger
        assert yard.scripts.settle_cancelled(worker, [generated(assignment, 9)]) == [False]
        assert yard.ledger(assignment.request) == ledger

    def test_request_whose_worker_cannot_be_told_pays_at_once(
        self, yard: PlayedYard, worker: str
    ) -> None:
        assignment = dispatch(yard, worker, submit(yard))
        yard.connection.xdel(yard.keys.lane(worker), assignment.entry)

        yard.scripts.cancel(assignment.request.client, assignment.request.id, "enough")

        assert service(yard) == 0
        assert counts(yard) == {}


def cancelled(yard: PlayedYard, worker: str, shown: list[int], tenant: str = "acme") -> Assignment:
    """A running request that is cancelled when it has published these tokens."""
    assignment = dispatch(yard, worker, submit(yard, tenant))
    request = assignment.request
    if shown:
        yard.emit(worker, assignment, shown)
    assert yard.scripts.cancel(request.client, request.id, "x") is Cancelled.CANCELLED
    return assignment


class TestSettleCancelled:
    def test_it_pays_what_was_generated(self, yard: PlayedYard, worker: str) -> None:
        assignment = cancelled(yard, worker, [])
        submit(yard)
        was = structs.replace(generated(assignment, 90), cached=4)

        assert yard.scripts.settle_cancelled(worker, [was]) == [True]

        assert service(yard) == TOKENS + 2 * 90
        assert line(yard)["acme"] == service(yard)
        assert "running" not in counts(yard)
        assert usage(yard) == {
            "adder requests": 1,
            "adder cancelled": 1,
            "adder in": TOKENS,
            "adder cached": 4,
            "adder out": 90,
        }
        ledger = yard.ledger(assignment.request)
        assert ledger["used"] == f"{TOKENS} 90"
        assert "charge" not in ledger

    def test_a_second_call_changes_nothing(self, yard: PlayedYard, worker: str) -> None:
        assignment = cancelled(yard, worker, [])
        yard.scripts.settle_cancelled(worker, [generated(assignment, 9)])
        before = service(yard), usage(yard), counts(yard), yard.ledger(assignment.request)

        again = yard.scripts.settle_cancelled(worker, [generated(assignment, 99)])

        assert again == [False]
        assert (service(yard), usage(yard), counts(yard), yard.ledger(assignment.request)) == before

    def test_published_tokens_are_the_least_and_are_counted_once(
        self, yard: PlayedYard, worker: str
    ) -> None:
        one, two = cancelled(yard, worker, [7, 8]), cancelled(yard, worker, [7, 8])

        # The engine had not begun with the first, in this attempt; the second was further.
        told = [generated(one, 0, None), generated(two, 5)]
        assert yard.scripts.settle_cancelled(worker, told) == [True] * 2

        assert service(yard) == 2 * TOKENS + 2 * (2 + 5)
        assert usage(yard)["adder out"] == 2 + 5
        assert usage(yard)["adder in"] == 2 * TOKENS

    def test_a_request_that_had_not_begun_pays_its_input(
        self, yard: PlayedYard, worker: str
    ) -> None:
        assignment = cancelled(yard, worker, [])

        yard.scripts.settle_cancelled(worker, [generated(assignment, 0, None)])

        assert service(yard) == TOKENS
        assert usage(yard) == {"adder requests": 1, "adder cancelled": 1, "adder in": TOKENS}

    @pytest.mark.parametrize("fault", ["worker", "entry", "running", "waiting"])
    def test_only_the_worker_of_the_cancelled_attempt_settles(
        self, yard: PlayedYard, worker: str, fault: str
    ) -> None:
        if fault in ("running", "waiting"):
            assignment = dispatch(yard, worker, submit(yard))
        else:
            assignment = cancelled(yard, worker, [])
        if fault == "waiting":
            yard.lose(worker)
        told = generated(assignment, 9)
        if fault == "entry":
            told = structs.replace(told, entry="1-0")
        before = service(yard), usage(yard), yard.ledger(assignment.request)

        caller = "other.1" if fault == "worker" else worker
        assert yard.scripts.settle_cancelled(caller, [told]) == [False]

        assert (service(yard), usage(yard), yard.ledger(assignment.request)) == before

    def test_a_result_that_a_cancel_has_overtaken_settles(
        self, yard: PlayedYard, worker: str
    ) -> None:
        assignment = cancelled(yard, worker, [])

        assert yard.scripts.finish(worker, [result(assignment, 20)]) == [Published.REPEATED]

        assert service(yard) == TOKENS + 2 * 20
        assert usage(yard)["adder out"] == 20
        assert usage(yard)["adder cancelled"] == usage(yard)["adder requests"] == 1
        assert counts(yard) == {}
        late = yard.scripts.settle_cancelled(worker, [generated(assignment, 0, None)])
        assert late == [False]

    def test_a_request_without_a_tenant_pays_too_while_others_wait(
        self, yard: PlayedYard, worker: str
    ) -> None:
        assignment = cancelled(yard, worker, [], tenant="")

        yard.scripts.settle_cancelled(worker, [generated(assignment, 9)])

        assert service(yard, "") == TOKENS + 2 * 9
        assert not yard.connection.exists(yard.keys.usage(""), yard.keys.tenant(""))

    @pytest.mark.parametrize("text", ["", "x", "-1 -1", "1e9 1", "99999999999999999999 0", "1"])
    def test_a_field_that_a_client_wrote_counts_as_none(
        self, yard: PlayedYard, worker: str, text: str
    ) -> None:
        assignment = cancelled(yard, worker, [])
        request = assignment.request
        yard.connection.hset(yard.keys.ledger(request.client, request.id), "used", text)

        yard.scripts.settle_cancelled(worker, [generated(assignment, 9, None)])

        assert service(yard) == 2 * 9
        assert usage(yard)["adder out"] == 9


class TestEnds:
    """What becomes of a charge where a request ends without a worker's result."""

    def test_answer_counts_a_request_that_never_ran(self, yard: PlayedYard) -> None:
        waiting = submit(yard)

        assert yard.answer(waiting) is Answered.DONE

        assert line(yard) == counts(yard) == {}
        assert service(yard) == 0
        assert usage(yard) == {" requests": 1, " failed": 1, " failed:INVALID_REQUEST": 1}

    @pytest.mark.parametrize("how", ["answer", "cancel"])
    def test_retry_that_ends_pays_for_what_was_published(
        self, yard: PlayedYard, worker: str, how: str
    ) -> None:
        # Given a request that has published two tokens and was taken back
        assignment = dispatch(yard, worker, submit(yard))
        request = assignment.request
        assert yard.emit(worker, assignment, [7, 8]) is Published.PUBLISHED
        yard.lose(worker)
        assert service(yard) == 0

        # If it ends before it runs again,
        if how == "answer":
            published = pack_tokens([7, 8])
            assert yard.answer(yard.waiting(request), published=published) is Answered.DONE
        else:
            assert yard.scripts.cancel(request.client, request.id, "x") is Cancelled.CANCELLED

        # I expect its tenant to have had its input and these.
        assert service(yard) == TOKENS + 2 * 2
        why = ("failed", "failed:INVALID_REQUEST") if how == "answer" else ("cancelled",)
        assert usage(yard) == {
            "adder requests": 1,
            **{f"adder {one}": 1 for one in why},
            "adder in": TOKENS,
            "adder out": 2,
        }
        assert counts(yard) == {}

    def test_running_request_whose_entry_is_deleted_pays_for_what_was_published(
        self, yard: PlayedYard, worker: str
    ) -> None:
        assignment = dispatch(yard, worker, submit(yard))
        yard.emit(worker, assignment, [7])
        yard.connection.xdel(yard.keys.lane(worker), assignment.entry)

        lost = yard.scripts.astray(0, 10_000_000).found
        assert yard.scripts.reconcile(yard.token, lost) == [True]

        assert service(yard) == 2
        assert counts(yard) == {}
        assert usage(yard)["adder failed"] == usage(yard)["adder out"] == 1

    def test_waiting_request_whose_entry_is_deleted_leaves_the_line(self, yard: PlayedYard) -> None:
        waiting = submit(yard)
        yard.connection.xdel(yard.keys.intake(waiting.intake), waiting.entry)

        lost = yard.scripts.astray(0, 10_000_000).found
        assert [one.where for one in lost] == ["normal:acme"]
        assert yard.scripts.reconcile(yard.token, lost) == [True]

        assert line(yard) == counts(yard) == {}

    def test_buried_entry_leaves_the_line(self, yard: PlayedYard) -> None:
        waiting = submit(yard)

        code = yard.scripts.bury(yard.token, waiting.intake, waiting.entry, "rubbish")

        assert code is Answered.DONE
        assert line(yard) == counts(yard) == {}

    def test_dead_letter_goes_back_to_its_tenant(self, yard: PlayedYard) -> None:
        waiting = submit(yard)
        yard.answer(waiting, dead="poisoned")
        (letter,) = dead_letters(yard)

        assert requeue_letters(yard, [letter]) == {letter.letter: ""}

        assert len(yard.intake("normal:acme")) == 1
        assert counts(yard) == {"waiting": 1, "waiting:normal": 1, "waiting_tokens": TOKENS}
        assert line(yard) == {"acme": 0}


def test_results_of_one_call_are_counted_as_those_of_several(yard: PlayedYard, worker: str) -> None:
    tenants, lengths = ("acme", "other", "acme", "acme"), (3, 100, 40, 7)
    waiting = [submit(yard, one) for one in tenants]
    running = [dispatch(yard, worker, one) for one in waiting]
    results = [result(*each) for each in zip(running, lengths, strict=True)]

    yard.scripts.finish(worker, results)

    assert service(yard) == 3 * TOKENS + 2 * (3 + 40 + 7)
    assert service(yard, "other") == TOKENS + 2 * 100
    assert usage(yard)["adder requests"] == 3
    assert usage(yard)["adder out"] == 3 + 40 + 7
    assert counts(yard) == counts(yard, "other") == {}
    usual = 32.0
    for length in (3, 40, 7):
        usual += (length - usual) / 8
    found = yard.connection.hget(yard.keys.tenant("acme"), "usual")
    assert float(found or 0) == pytest.approx(usual, abs=0.1)


def test_wait_before_the_first_attempt_is_counted_once(yard: PlayedYard, worker: str) -> None:
    first = dispatch(yard, worker, submit(yard))
    yard.lose(worker)
    dispatch(yard, yard.worker("again"), yard.waiting(first.request))

    fields = yard.connection.hgetall(yard.keys.usage("acme"))

    assert sum(int(count) for name, count in fields.items() if b" wait:" in name) == 1


def test_usage_is_counted_under_the_servers_day(yard: PlayedYard, worker: str) -> None:
    seconds, _ = yard.connection.time()
    assignment = dispatch(yard, worker, submit(yard))
    yard.scripts.finish(worker, [result(assignment)])
    after, _ = yard.connection.time()

    days = {name.split()[0].decode() for name in yard.connection.hkeys(yard.keys.usage("acme"))}

    assert days <= {f"{datetime.fromtimestamp(at, UTC):%Y%m%d}" for at in (seconds, after)}


def test_days_are_those_of_the_calendar(connection: redis.Redis) -> None:
    """Every day from 2024 to 2105, whose 2100 is no leap year."""
    text = (LUA / "include" / "today.lua").read_text()
    call = text.replace("redis.call('TIME')[1]", "ARGV[1]") + "\nreturn today()"
    run = connection.register_script(call)
    first = datetime(2024, 1, 1, tzinfo=UTC)
    with connection.pipeline(transaction=False) as pipeline:
        days = [first + timedelta(days=at) for at in range(81 * 366)]
        for day in days:
            run(args=[int(day.timestamp()) + 86_399], client=pipeline)
        found = pipeline.execute()

    assert [day.decode() for day in found] == [f"{day:%Y%m%d}" for day in days]
