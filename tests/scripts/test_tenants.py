"""Requests of tenants: their own intakes and the line of who waits."""

from __future__ import annotations

from tests.scripts.tenant_rig import TOKENS, counts, dispatch, line, result, service, submit, usage
from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.scripts.answers import Transfer, Transferred


class TestSubmit:
    def test_requests_wait_in_an_intake_of_their_own(self, yard: PlayedYard) -> None:
        waiting = submit(yard)

        assert waiting.intake == "normal:acme"
        assert [entry for entry, _ in yard.intake("normal:acme")] == [waiting.entry]
        assert yard.intake("normal") == []
        assert line(yard) == {"acme": 0}
        assert counts(yard) == {"waiting": 1, "waiting:normal": 1, "waiting_tokens": TOKENS}
        [(_, arrival)] = yard.connection.xrange(yard.keys.arrivals)
        assert arrival == {b"event": b"tenants", b"intake": b"normal:acme"}

    def test_newcomer_stands_beside_the_least_of_those_in_line(self, yard: PlayedYard) -> None:
        yard.connection.zadd(yard.keys.service, {"acme": 500, "rested": 7})
        submit(yard)

        submit(yard, "rested")

        assert line(yard) == {"acme": 500, "rested": 500}
        assert service(yard, "rested") == 500
        # What it has really had is known.
        assert counts(yard, "rested")["lifted"] == 493
        assert "lifted" not in counts(yard)

    def test_newcomer_to_an_empty_line_stands_where_the_last_one_left(
        self, yard: PlayedYard, worker: str
    ) -> None:
        dispatch(yard, worker, submit(yard), amount=300)
        assert line(yard) == {}

        submit(yard, "rested")

        assert line(yard) == {"rested": 300}

    def test_waiting_requests_of_tenants_count_for_the_yards_bound(self, yard: PlayedYard) -> None:
        yard.connection.hset(yard.keys.info, "max_num_queued_reqs", 2)
        submit(yard)
        submit(yard, "other", "low")

        (answer,) = yard.scripts.submit("normal", [make_request()])

        assert answer.code.name == "FULL"


class TestDispatch:
    def test_charge_is_added_to_the_service(self, yard: PlayedYard, worker: str) -> None:
        first, _ = submit(yard), submit(yard)

        assignment = dispatch(yard, worker, first, amount=100)

        assert assignment.is_charged
        assert assignment.sid == f"normal:acme/{first.entry}"
        assert line(yard) == {"acme": 100}
        assert service(yard) == 100
        assert counts(yard)["running"] == counts(yard)["waiting"] == 1
        assert yard.ledger(first.request)["charge"] == "100 1.0 2.0 acme adder"

    def test_last_request_takes_the_tenant_out_of_the_line(
        self, yard: PlayedYard, worker: str
    ) -> None:
        waiting = submit(yard)

        dispatch(yard, worker, waiting)

        assert line(yard) == {}
        assert service(yard) == 100
        assert counts(yard) == {"running": 1}
        assert yard.queued_tokens() == 0
        assert 0 < yard.ttl_s(yard.keys.intake("normal:acme")) <= 60

    def test_nobody_waits_with_tokens(self, yard: PlayedYard, worker: str) -> None:
        waiting = submit(yard)
        yard.connection.hset(yard.keys.tenant("acme"), "waiting_tokens", 999)

        dispatch(yard, worker, waiting)

        assert "waiting_tokens" not in counts(yard)

    def test_charged_request_without_a_tenant_moves_only_its_service(
        self, yard: PlayedYard, worker: str
    ) -> None:
        waiting = yard.submit(make_request(tokens=range(TOKENS)))

        assignment = dispatch(yard, worker, waiting, amount=100)
        yard.scripts.finish(worker, [result(assignment)])

        assert service(yard, "") == TOKENS + 2 * 3
        assert counts(yard, "") == usage(yard, "") == {}


class TestTransfer:
    def test_plain_entry_moves_to_its_tenant(self, yard: PlayedYard) -> None:
        fields = {"id": "q1", "prompt": "x" * 40, "tenant": "acme"}
        waiting = yard.push(fields)

        codes = yard.scripts.transfer(
            yard.token, "normal", [Transfer(waiting.entry, "acme", "anon", "q1")]
        )

        assert [one.code for one in codes] == [Transferred.MOVED]
        assert yard.intake("normal") == []
        assert [entry for entry, _ in yard.intake("normal:acme")] == [waiting.entry]
        assert line(yard) == {"acme": 0}
        assert counts(yard)["waiting"] == 1

    def test_entry_that_is_gone_moves_nothing(self, yard: PlayedYard) -> None:
        codes = yard.scripts.transfer(yard.token, "normal", [Transfer("1-1", "acme", "anon", "q1")])

        assert [one.code for one in codes] == [Transferred.GONE]
        assert line(yard) == {}


class TestRecount:
    def test_entries_deleted_by_hand_are_counted_no_more(self, yard: PlayedYard) -> None:
        first, _ = submit(yard), submit(yard)
        yard.connection.xdel(yard.keys.intake("normal:acme"), first.entry)

        assert yard.scripts.recount(yard.token, "acme") == 1

        assert counts(yard)["waiting"] == 1
        assert line(yard) == {"acme": 0}

        yard.connection.delete(yard.keys.intake("normal:acme"))
        assert yard.scripts.recount(yard.token, "acme") == 0
        assert line(yard) == counts(yard) == {}

    def test_common_intakes_are_in_line_while_others_are(self, yard: PlayedYard) -> None:
        yard.submit()
        assert yard.scripts.recount(yard.token, "") == 1
        assert line(yard) == {}

        waiting = submit(yard)
        yard.scripts.recount(yard.token, "")
        assert line(yard) == {"acme": 0, "": 0}

        yard.scripts.cancel(waiting.request.client, waiting.request.id, "enough")
        yard.scripts.recount(yard.token, "")
        assert line(yard) == {}


def test_emptied_intake_lives_again_with_the_next_request(yard: PlayedYard, worker: str) -> None:
    dispatch(yard, worker, submit(yard))
    assert yard.ttl_s(yard.keys.intake("normal:acme")) > 0

    submit(yard)

    assert yard.ttl_s(yard.keys.intake("normal:acme")) == -1
