"""Requests of tenants: their own intakes, the line, charges and what becomes of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
import redis

from tests.scripts.test_headers import LUA
from tests.support.builders import make_delta, make_request
from tests.support.yard import QueuedRequest, Yard
from tokenyard.admin.dead_letters import dead_letters, requeue_letter
from tokenyard.protocol.replies import ErrorInfo, Reply, Usage, json_text
from tokenyard.protocol.wire import Assignment, pack_tokens
from tokenyard.scripts import (
    Answered,
    Cancelled,
    Charge,
    Dispatched,
    HandedBack,
    Publication,
    Published,
    Reconciled,
    Transfer,
    Transferred,
)

TOKENS = 10  # of each prompt here


def submit(yard: Yard, tenant: str = "acme", priority_class: str = "normal") -> QueuedRequest:
    """Submit a request of a tenant."""
    request = make_request(tenant=tenant, tokens=range(TOKENS))
    (accepted,) = yard.scripts.submit(priority_class, [request])
    intake, _, entry = accepted.sid.partition("/")
    return QueuedRequest(request, intake, entry)


def dispatch(yard: Yard, worker: str, waiting: QueuedRequest, amount: float = 100) -> Assignment:
    """Charge a waiting request and move it onto a lane."""
    tenant = waiting.request.tenant
    charge = Charge(tenant, amount, 1.0, 2.0, "adder")
    move = msgspec.structs.replace(waiting.to(worker), charge=charge)
    assert yard.scripts.dispatch(yard.token, [move]) == [Dispatched.DISPATCHED]
    return yard.lane(worker)[-1]


def result(
    assignment: Assignment, output: int = 3, status: str = "completed", code: str = ""
) -> Publication:
    """A result with so many tokens, and the code of an error."""
    usage = msgspec.json.encode(Usage(TOKENS, output, TOKENS + output, 4)).decode()
    reply = Reply(
        id=assignment.request.id,
        event="result",
        seq=0,
        tokens=pack_tokens(range(output)),
        status=status,
        usage=usage,
        error=json_text(ErrorInfo(code, "")) if code else None,
    )
    return Publication(assignment, reply)


def line(yard: Yard) -> dict[str, float]:
    """Who is in line, with what they have had."""
    return {
        tenant.decode(): had
        for tenant, had in yard.connection.zrange(yard.keys.line, 0, -1, withscores=True)
    }


def service(yard: Yard, tenant: str = "acme") -> float | None:
    return yard.connection.zscore(yard.keys.service, tenant)


def counts(yard: Yard, tenant: str = "acme") -> dict[str, int]:
    """The counts of a tenant that are not 0."""
    fields = yard.connection.hgetall(yard.keys.tenant(tenant))
    return {
        name.decode(): int(count)
        for name, count in fields.items()
        if count.isdigit() and int(count)
    }


def usage(yard: Yard, tenant: str = "acme") -> dict[str, int]:
    """What a tenant has used, without the day and the waits."""
    fields = yard.connection.hgetall(yard.keys.usage(tenant))
    named = {name.decode().partition(" ")[2]: int(count) for name, count in fields.items()}
    return {name: count for name, count in named.items() if " wait:" not in name}


class TestSubmit:
    def test_requests_wait_in_an_intake_of_their_own(self, yard: Yard) -> None:
        waiting = submit(yard)

        assert waiting.intake == "normal:acme"
        assert [entry for entry, _ in yard.intake("normal:acme")] == [waiting.entry]
        assert yard.intake("normal") == []
        assert line(yard) == {"acme": 0}
        assert counts(yard) == {"waiting": 1, "waiting:normal": 1, "waiting_tokens": TOKENS}
        [(_, arrival)] = yard.connection.xrange(yard.keys.arrivals)
        assert arrival == {b"event": b"tenants", b"intake": b"normal:acme"}

    def test_newcomer_stands_beside_the_least_of_those_in_line(self, yard: Yard) -> None:
        yard.connection.zadd(yard.keys.service, {"acme": 500, "rested": 7})
        submit(yard)

        submit(yard, "rested")

        assert line(yard) == {"acme": 500, "rested": 500}
        assert service(yard, "rested") == 500
        # What it has really had is known.
        assert counts(yard, "rested")["lifted"] == 493
        assert "lifted" not in counts(yard)

    def test_newcomer_to_an_empty_line_stands_where_the_last_one_left(
        self, yard: Yard, worker: str
    ) -> None:
        dispatch(yard, worker, submit(yard), amount=300)
        assert line(yard) == {}

        submit(yard, "rested")

        assert line(yard) == {"rested": 300}

    def test_waiting_requests_of_tenants_count_for_the_yards_bound(self, yard: Yard) -> None:
        yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 2)
        submit(yard)
        submit(yard, "other", "low")

        (answer,) = yard.scripts.submit("normal", [make_request()])

        assert answer.code.name == "FULL"


class TestDispatch:
    def test_charge_is_added_to_the_service(self, yard: Yard, worker: str) -> None:
        first, _ = submit(yard), submit(yard)

        assignment = dispatch(yard, worker, first, amount=100)

        assert assignment.is_charged
        assert assignment.sid == f"normal:acme/{first.entry}"
        assert line(yard) == {"acme": 100}
        assert service(yard) == 100
        assert counts(yard)["running"] == counts(yard)["waiting"] == 1
        assert yard.ledger(first.request)["charge"] == "100 1.0 2.0 acme adder"

    def test_last_request_takes_the_tenant_out_of_the_line(self, yard: Yard, worker: str) -> None:
        waiting = submit(yard)

        dispatch(yard, worker, waiting)

        assert line(yard) == {}
        assert service(yard) == 100
        assert counts(yard) == {"running": 1}
        assert yard.queued_tokens() == 0
        assert 0 < yard.ttl_s(yard.keys.intake("normal:acme")) <= 60

    def test_nobody_waits_with_tokens(self, yard: Yard, worker: str) -> None:
        waiting = submit(yard)
        yard.connection.hset(yard.keys.tenant("acme"), "waiting_tokens", 999)

        dispatch(yard, worker, waiting)

        assert "waiting_tokens" not in counts(yard)

    def test_charged_request_without_a_tenant_moves_only_its_service(
        self, yard: Yard, worker: str
    ) -> None:
        waiting = yard.submit(make_request(tokens=range(TOKENS)))

        assignment = dispatch(yard, worker, waiting, amount=100)
        yard.scripts.finish(worker, [result(assignment)])

        assert service(yard, "") == TOKENS + 2 * 3
        assert counts(yard, "") == usage(yard, "") == {}


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


class TestTransfer:
    def test_plain_entry_moves_to_its_tenant(self, yard: Yard) -> None:
        fields = {"id": "q1", "prompt": "x" * 40, "tenant": "acme"}
        waiting = yard.push(fields)
        yard.read()

        codes = yard.scripts.transfer(
            yard.token, "normal", [Transfer(waiting.entry, "acme", "anon", "q1")]
        )

        assert [one.code for one in codes] == [Transferred.MOVED]
        assert yard.intake("normal") == []
        assert [entry for entry, _ in yard.intake("normal:acme")] == [waiting.entry]
        assert line(yard) == {"acme": 0}
        assert counts(yard)["waiting"] == 1

    def test_entry_that_is_gone_moves_nothing(self, yard: Yard) -> None:
        codes = yard.scripts.transfer(yard.token, "normal", [Transfer("1-1", "acme", "anon", "q1")])

        assert [one.code for one in codes] == [Transferred.GONE]
        assert line(yard) == {}


class TestRecount:
    def test_entries_deleted_by_hand_are_counted_no_more(self, yard: Yard) -> None:
        first, _ = submit(yard), submit(yard)
        yard.connection.xdel(yard.keys.intake("normal:acme"), first.entry)

        assert yard.scripts.recount(yard.token, "acme") == 1

        assert counts(yard)["waiting"] == 1
        assert line(yard) == {"acme": 0}

        yard.connection.delete(yard.keys.intake("normal:acme"))
        assert yard.scripts.recount(yard.token, "acme") == 0
        assert line(yard) == counts(yard) == {}

    def test_common_intakes_are_in_line_while_others_are(self, yard: Yard) -> None:
        yard.submit()
        assert yard.scripts.recount(yard.token, "") == 1
        assert line(yard) == {}

        waiting = submit(yard)
        yard.scripts.recount(yard.token, "")
        assert line(yard) == {"acme": 0, "": 0}

        yard.scripts.cancel(waiting.request.client, waiting.request.id, "enough")
        yard.scripts.recount(yard.token, "")
        assert line(yard) == {}


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


def test_emptied_intake_lives_again_with_the_next_request(yard: Yard, worker: str) -> None:
    dispatch(yard, worker, submit(yard))
    assert yard.ttl_s(yard.keys.intake("normal:acme")) > 0

    submit(yard)

    assert yard.ttl_s(yard.keys.intake("normal:acme")) == -1


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
