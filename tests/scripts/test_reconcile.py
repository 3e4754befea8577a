"""astray.lua and reconcile.lua: requests whose entry was deleted by hand."""

from __future__ import annotations

import pytest

from tests.scripts.test_hostile_ledgers import NOWHERE
from tests.scripts.test_invalid_counters import INVALID
from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest, requests
from tokenyard.protocol.replies import to_result
from tokenyard.protocol.wire import Request, pack_tokens
from tokenyard.scripts.answers import Cancelled, HandedBack, LostRequest, Published, Submitted


def astray(yard: PlayedYard) -> list[LostRequest]:
    """All lost requests that a complete scan finds."""
    cursor, found = 0, list[LostRequest]()
    while True:
        look = yard.scripts.astray(cursor, 100)
        found += look.found
        if not (cursor := look.cursor):
            return found


def of(request: Request, found: list[LostRequest]) -> list[LostRequest]:
    return [one for one in found if one.request_id == request.id]


def drop(yard: PlayedYard, waiting: QueuedRequest) -> None:
    assert yard.connection.xdel(yard.keys.intake(waiting.intake), waiting.entry) == 1


def error(yard: PlayedYard, request: Request) -> str:
    reply = yard.result(request)
    assert reply is not None
    result = to_result(reply)
    assert result.error is not None
    assert result.status == "failed"
    return f"{result.error.code}: {result.error.message}"


class TestLook:
    def test_requests_in_their_places_are_not_lost(self, yard: PlayedYard, worker: str) -> None:
        waits, runs, back, over = requests(4)
        yard.submit(waits)
        yard.assign(worker, runs)
        given_back = yard.assign(worker, back)
        yard.scripts.hand_back(worker, given_back, 0, "no memory")
        yard.submit(over)
        yard.scripts.cancel(over.client, over.id, "")
        yard.push({"id": "plain", "prompt": "x"})

        assert of(waits, astray(yard)) == of(runs, astray(yard)) == []
        assert of(back, astray(yard)) == of(over, astray(yard)) == []

    def test_deleted_entries_of_intakes_and_lanes_are_found(
        self, yard: PlayedYard, worker: str
    ) -> None:
        waits, runs, back = requests(3)
        waiting, assignment = yard.submit(waits), yard.assign(worker, runs)
        yard.scripts.hand_back(worker, yard.assign(worker, back), 0, "no memory")
        retry = yard.waiting(back).entry

        drop(yard, waiting)
        yard.connection.delete(yard.keys.lane(worker), yard.keys.intake("retry"))

        found = astray(yard)
        client = waits.client
        assert of(waits, found) == [
            LostRequest(client, waits.id, "waiting", "normal", waiting.entry, may_run=False)
        ]
        assert of(runs, found) == [
            LostRequest(client, runs.id, "assigned", worker, assignment.entry, may_run=True)
        ]
        assert of(back, found) == [
            LostRequest(client, back.id, "waiting", "retry", retry, may_run=False)
        ]

    def test_request_of_a_worker_without_a_lease_cannot_run(
        self, yard: PlayedYard, worker: str
    ) -> None:
        request = make_request()
        yard.assign(worker, request)
        yard.connection.xtrim(yard.keys.lane(worker), maxlen=0, approximate=False)
        yard.scripts.retire(worker, "lost", "killed")

        (found,) = of(request, astray(yard))

        assert not found.may_run

    def test_a_scan_is_bounded_and_ends(self, yard: PlayedYard) -> None:
        asked = requests(200)
        for request in asked:
            drop(yard, yard.submit(request))
        look, cursors, found = yard.scripts.astray(0, 32), 1, set[str]()
        assert look.cursor
        assert look.ledgers < 200
        while True:
            found |= {one.request_id for one in look.found}
            if not look.cursor:
                break
            look, cursors = yard.scripts.astray(look.cursor, 32), cursors + 1
        assert found >= {request.id for request in asked}
        assert cursors > 3

    def test_other_yards_are_not_read(self, yard: PlayedYard) -> None:
        other = "tokenyard:{other}:request:anon/x"
        yard.connection.hset(other, mapping={"state": "waiting", "sid": "normal/1-1"})
        try:
            assert [one for one in astray(yard) if one.request_id == "x"] == []
        finally:
            yard.connection.delete(other)

    def test_scan_counts_the_queued_tokens(self, yard: PlayedYard) -> None:
        gone = yard.submit(make_request(tokens=range(10)))
        yard.submit(make_request(tokens=range(20)))
        drop(yard, gone)
        looks = [yard.scripts.astray(0, 1_000_000)]
        assert looks[0].cursor == 0
        assert (looks[0].tokens, looks[0].queued_tokens) == (20, 30)


class TestEnd:
    @pytest.mark.parametrize("reply_to", ["", "replies:c"])
    def test_client_gets_the_result_on_its_reply_stream(
        self, yard: PlayedYard, reply_to: str
    ) -> None:
        request = make_request(client="c", reply_to=reply_to)
        drop(yard, yard.submit(request))

        codes = yard.scripts.reconcile(yard.token, of(request, astray(yard)))

        assert codes == [True]
        (reply,) = [one for one in yard.replies(request) if one.id == request.id]
        assert (reply.event, reply.status) == ("result", "failed")
        assert error(yard, request).startswith("ENTRY_LOST: somebody deleted its entry from intake")
        for key in (yard.keys.ledger("c", request.id), yard.keys.reply("c", request.id)):
            assert 3500 < yard.ttl_s(key) <= 3600
        assert yard.ttl_s(yard.keys.replies("c")) > 0
        assert of(request, astray(yard)) == []

    def test_result_has_the_published_tokens(self, yard: PlayedYard, worker: str) -> None:
        request = make_request(stream=True)
        yard.emit(worker, yard.assign(worker, request), [7, 8])
        yard.connection.xtrim(yard.keys.lane(worker), maxlen=0, approximate=False)

        yard.scripts.reconcile(yard.token, of(request, astray(yard)))

        result = yard.result(request)
        assert (result.seq, result.tokens) == (2, pack_tokens([7, 8]))
        assert yard.published(request) == b""

    def test_worker_of_the_request_gets_a_cancel_and_is_fenced(
        self, yard: PlayedYard, worker: str
    ) -> None:
        request = make_request()
        assignment = yard.assign(worker, request, alone=True)
        yard.connection.xtrim(yard.keys.lane(worker), maxlen=0, approximate=False)

        yard.scripts.reconcile(yard.token, of(request, astray(yard)))

        assert yard.told_to_cancel(worker) == [assignment.entry]
        assert yard.alone(worker) is None
        assert yard.finish(worker, assignment, [1]) is Published.REPEATED
        assert yard.scripts.hand_back(worker, assignment, 0, "x") is HandedBack.STALE
        assert error(yard, request).startswith("ENTRY_LOST")

    def test_lost_worker_gets_no_cancel(self, yard: PlayedYard, worker: str) -> None:
        request = make_request()
        yard.assign(worker, request)
        yard.connection.xtrim(yard.keys.lane(worker), maxlen=0, approximate=False)
        yard.scripts.retire(worker, "crashed", "x")

        yard.scripts.reconcile(yard.token, of(request, astray(yard)))

        assert error(yard, request).startswith("ENTRY_LOST")
        assert not yard.connection.exists(yard.keys.lane(worker))

    def test_id_is_known_until_its_result_expires(self, yard: PlayedYard) -> None:
        request = make_request()
        drop(yard, yard.submit(request))
        yard.scripts.reconcile(yard.token, of(request, astray(yard)))

        (again,) = yard.scripts.submit("normal", [request])
        assert (again.code, again.state) == (Submitted.KNOWN, "failed")
        assert yard.scripts.cancel(request.client, request.id, "") is Cancelled.OVER

    def test_excess_of_queued_tokens_is_subtracted(self, yard: PlayedYard) -> None:
        gone = yard.submit(make_request(tokens=range(10)))
        yard.submit(make_request(tokens=range(20)))
        drop(yard, gone)

        assert yard.scripts.reconcile(yard.token, [], excess_tokens=10) == []
        assert yard.queued_tokens() == 20
        yard.scripts.reconcile(yard.token, [], excess_tokens=100)
        assert yard.queued_tokens() == 0

    @pytest.mark.parametrize("value", INVALID)
    def test_an_invalid_count_restarts(self, yard: PlayedYard, value: str) -> None:
        yard.submit(make_request(tokens=range(20)))
        yard.connection.hset(yard.keys.tally, "queued_tokens", value)
        look = yard.scripts.astray(0, 1_000_000)
        excess = look.queued_tokens - look.tokens
        yard.scripts.reconcile(yard.token, [], excess_tokens=excess)
        assert yard.queued_tokens() == 20


class TestWhatMovesMeanwhile:
    def test_request_with_its_entry_is_unchanged(
        self, yard: PlayedYard, waiting: QueuedRequest
    ) -> None:
        name = (waiting.request.client, waiting.request.id)
        claim = LostRequest(*name, "waiting", "normal", waiting.entry, may_run=False)

        assert yard.scripts.reconcile(yard.token, [claim]) == [False]
        assert yard.intake()[0][0] == waiting.entry

    def test_request_that_moved_since_the_scan_is_unchanged(
        self, yard: PlayedYard, worker: str, waiting: QueuedRequest
    ) -> None:
        # Given a request that waits during the scan, and is on a lane at the call
        name = (waiting.request.client, waiting.request.id)
        was = LostRequest(*name, "waiting", "normal", waiting.entry, may_run=False)
        assignment = yard.place(waiting, worker)

        assert yard.scripts.reconcile(yard.token, [was]) == [False]

        # And the other way round
        on_lane = LostRequest(*name, "assigned", worker, assignment.entry, may_run=True)
        yard.scripts.hand_back(worker, assignment, 0, "no memory")
        assert yard.scripts.reconcile(yard.token, [on_lane]) == [False]
        assert yard.result(waiting.request) is None


class TestLedgersThatAClientWrote:
    @pytest.mark.parametrize("ledger", NOWHERE)
    def test_request_ends_as_failed(self, yard: PlayedYard, ledger: dict[str, str | bytes]) -> None:
        request = make_request()
        key = yard.keys.ledger(request.client, request.id)
        yard.connection.hset(key, mapping=ledger)
        yard.submit()  # so that the intake exists and has an entry

        assert yard.scripts.reconcile(yard.token, of(request, astray(yard))) == [True]
        assert error(yard, request).startswith("ENTRY_LOST")

    def test_ledger_of_no_request_and_key_of_another_type(self, yard: PlayedYard) -> None:
        start = yard.keys.ledger("", "")[:-1].encode()
        yard.connection.hset(start + b"\xff/x", "state", "waiting")
        yard.connection.hset(start + b"c", "state", "waiting")
        yard.connection.set(start + b"c/text", "waiting")
        yard.connection.hset(yard.keys.ledger("c", "odd"), "state", "odd")

        assert astray(yard) == []

    def test_lane_that_is_no_stream(self, yard: PlayedYard) -> None:
        request = make_request()
        yard.connection.set(yard.keys.lane("w.9"), "x")
        ledger = {"state": "assigned", "worker": "w.9", "entry": "1-1"}
        yard.connection.hset(yard.keys.ledger(request.client, request.id), mapping=ledger)

        yard.scripts.reconcile(yard.token, of(request, astray(yard)))
        assert error(yard, request).startswith("ENTRY_LOST")
