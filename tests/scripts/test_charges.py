"""What a tenant pays and what is counted for it, however its request ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import redis

from tests.scripts.tenant_rig import TOKENS, counts, dispatch, line, result, service, submit, usage
from tests.scripts.test_headers import LUA
from tests.support.builders import make_delta
from tests.support.yard import Yard
from tokenyard.admin.dead_letters import dead_letters, requeue_letter
from tokenyard.protocol.wire import pack_tokens
from tokenyard.scripts import Answered, Cancelled, HandedBack, Publication, Published, Reconciled


class TestFinish:
    def test_charge_is_settled_by_what_was_used(self, yard: Yard, worker: str) -> None:
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

    def test_repeated_result_is_paid_once(self, yard: Yard, worker: str) -> None:
        assignment = dispatch(yard, worker, submit(yard))
        yard.scripts.finish(worker, [result(assignment)])
        before = service(yard), usage(yard)

        assert yard.scripts.finish(worker, [result(assignment)]) == [Published.REPEATED]

        assert (service(yard), usage(yard)) == before

    def test_failures_are_counted_by_code(self, yard: Yard, worker: str) -> None:
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
    def test_charge_is_given_back(self, yard: Yard, worker: str, how: str) -> None:
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
    def test_waiting_request_leaves_the_line(self, yard: Yard) -> None:
        waiting = submit(yard)

        code = yard.scripts.cancel(waiting.request.client, waiting.request.id, "enough")

        assert code is Cancelled.CANCELLED
        assert line(yard) == counts(yard) == {}
        assert usage(yard) == {" requests": 1, " cancelled": 1}

    def test_running_request_pays_its_input(self, yard: Yard, worker: str) -> None:
        assignment = dispatch(yard, worker, submit(yard))

        yard.scripts.cancel(assignment.request.client, assignment.request.id, "enough")

        assert service(yard) == TOKENS
        assert counts(yard) == {}
        assert usage(yard) == {"adder requests": 1, "adder cancelled": 1, "adder in": TOKENS}


class TestEnds:
    """What becomes of a charge where a request ends without a worker's result."""

    def test_answer_counts_a_request_that_never_ran(self, yard: Yard) -> None:
        waiting = submit(yard)

        assert yard.answer(waiting) is Answered.DONE

        assert line(yard) == counts(yard) == {}
        assert service(yard) == 0
        assert usage(yard) == {" requests": 1, " failed": 1, " failed:INVALID_REQUEST": 1}

    @pytest.mark.parametrize("how", ["answer", "cancel"])
    def test_retry_that_ends_pays_for_what_was_published(
        self, yard: Yard, worker: str, how: str
    ) -> None:
        # Given a request that has published two tokens and was taken back
        assignment = dispatch(yard, worker, submit(yard))
        request = assignment.request
        delta = Publication(assignment, make_delta(request.id, 0, [7, 8]))
        assert yard.scripts.emit(worker, [delta]) == [Published.PUBLISHED]
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
        self, yard: Yard, worker: str
    ) -> None:
        assignment = dispatch(yard, worker, submit(yard))
        delta = Publication(assignment, make_delta(assignment.request.id, 0, [7]))
        yard.scripts.emit(worker, [delta])
        yard.connection.xdel(yard.keys.lane(worker), assignment.entry)

        lost = yard.scripts.astray(0, 10_000_000).found
        assert yard.scripts.reconcile(yard.token, lost) == [Reconciled.ENDED]

        assert service(yard) == 2
        assert counts(yard) == {}
        assert usage(yard)["adder failed"] == usage(yard)["adder out"] == 1

    def test_waiting_request_whose_entry_is_deleted_leaves_the_line(self, yard: Yard) -> None:
        waiting = submit(yard)
        yard.connection.xdel(yard.keys.intake(waiting.intake), waiting.entry)

        lost = yard.scripts.astray(0, 10_000_000).found
        assert [one.where for one in lost] == ["normal:acme"]
        assert yard.scripts.reconcile(yard.token, lost) == [Reconciled.ENDED]

        assert line(yard) == counts(yard) == {}

    def test_buried_entry_leaves_the_line(self, yard: Yard) -> None:
        waiting = submit(yard)

        code = yard.scripts.bury(yard.token, waiting.intake, waiting.entry, "rubbish")

        assert code is Answered.DONE
        assert line(yard) == counts(yard) == {}

    def test_dead_letter_goes_back_to_its_tenant(self, yard: Yard) -> None:
        waiting = submit(yard)
        yard.answer(waiting, dead="poisoned")
        (letter,) = dead_letters(yard.connection, yard.keys)

        sid = requeue_letter(yard.connection, yard.keys, letter)

        assert sid.startswith("normal:acme/")
        assert counts(yard) == {"waiting": 1, "waiting:normal": 1, "waiting_tokens": TOKENS}
        assert line(yard) == {"acme": 0}


def test_results_of_one_call_are_counted_as_those_of_several(yard: Yard, worker: str) -> None:
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


def test_wait_before_the_first_attempt_is_counted_once(yard: Yard, worker: str) -> None:
    first = dispatch(yard, worker, submit(yard))
    yard.lose(worker)
    dispatch(yard, yard.worker("again"), yard.waiting(first.request))

    fields = yard.connection.hgetall(yard.keys.usage("acme"))

    assert sum(int(count) for name, count in fields.items() if b" wait:" in name) == 1


def test_usage_is_counted_under_the_servers_day(yard: Yard, worker: str) -> None:
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
