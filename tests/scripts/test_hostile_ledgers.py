"""Ledgers of a client's own requests with hostile values: no other client is affected.

The users of deploy/ once allowed this; each test names the former damage.
"""

from __future__ import annotations

import pytest

from coordinator.recovery.trial_monitor import TrialMonitor
from coordinator.roster import Roster
from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.wire import Assignment, Request
from tokenyard.scripts.answers import Answered, Cancelled, Dispatched, HandedBack, Published

#: Values that are no count.
ODD = ["many", "-5", "1e308", "nan", "9" * 40, "9" * 9, "1.5", b"\xff", ""]
#: Ledgers that name no place.
NOWHERE: list[dict[str, str | bytes]] = [
    {"state": "waiting"},
    {"state": "waiting", "sid": "normal"},
    {"state": "waiting", "sid": "events/1-1"},
    {"state": "waiting", "sid": "../x/1-1"},
    {"state": "waiting", "sid": "normal/-"},
    {"state": "waiting", "sid": "normal/nothing"},
    {"state": "waiting", "sid": "normal/99999999999999999999-1"},
    {"state": "waiting", "sid": b"\xff/1-1"},
    {"state": "waiting", "sid": "normal/1-1", "intake": "retry"},
    {"state": "assigned"},
    {"state": "assigned", "worker": b"\xff", "entry": "1-1"},
    {"state": "assigned", "worker": "w.1", "entry": "+"},
]


def write(yard: PlayedYard, request: Request, **fields: str | bytes) -> None:
    yard.connection.hset(yard.keys.ledger(request.client, request.id), mapping=fields)


def count(yard: PlayedYard, request: Request, field: str) -> bytes | None:
    return yard.connection.hget(yard.keys.ledger(request.client, request.id), field)


@pytest.mark.parametrize("odd", ODD)
class TestCounts:
    def test_invalid_attempt_fails_no_round_of_dispatch(
        self, yard: PlayedYard, worker: str, odd
    ) -> None:
        # Each round of dispatch failed as a whole, so no request got a worker.
        mine, theirs = yard.submit(make_request()), yard.submit(make_request())
        write(yard, mine.request, attempt=odd)

        codes = yard.scripts.dispatch(yard.token, [mine.to(worker), theirs.to(worker)])

        assert codes == [Dispatched.DISPATCHED] * 2
        assert [one.attempt for one in yard.lane(worker)] == [1, 1]

    @pytest.mark.parametrize("why", ["crashed", "lost"])
    def test_invalid_history_stops_no_rescue(self, yard: PlayedYard, worker: str, odd, why) -> None:
        # The lane of a lost worker, with requests of other clients, could not be rescued.
        mine, theirs = yard.assign(worker, alone=True), make_request()
        fields = dict.fromkeys(("crashes", "suspected", "crashed_alone", "lost_alone"), odd)
        write(yard, mine.request, **fields)
        yard.scripts.retire(worker, why, "x")

        assert yard.rescue(worker) == 0

        assert count(yard, mine.request, "crashes") == b"1"
        assert count(yard, mine.request, f"{why}_alone") == b"1"
        again, other = yard.worker(), yard.submit(theirs)
        ((entry, _),) = yard.intake("retry")
        waiting = QueuedRequest(mine.request, "retry", entry)
        codes = yard.scripts.dispatch(yard.token, [waiting.to(again), other.to(again)])
        assert codes == [Dispatched.DISPATCHED] * 2
        assert [one.crashes for one in yard.lane(again)] == [1, 0]

    def test_invalid_faults_stop_no_hand_back(self, yard: PlayedYard, worker: str, odd) -> None:
        # The worker could not hand the request back, and took the server for broken.
        mine = yard.assign(worker)
        write(yard, mine.request, faults=odd, crashes=odd)

        assert yard.scripts.hand_back(worker, mine, 0, "no memory") is HandedBack.HANDED_BACK

        assert count(yard, mine.request, "faults") == b"1"
        ((entry, _),) = yard.intake("retry")
        assert yard.place(QueuedRequest(mine.request, "retry", entry), worker).faults == 1


@pytest.mark.parametrize("odd", [*ODD, "9" * 5000, "9" * 5000 + "-1 w.1"])
def test_invalid_fields_stop_no_trial_monitor(yard: PlayedYard, worker: str, odd) -> None:
    # The leader crashed, and so did its successors.
    roster = Roster(yard)
    patience = CoordinatorSettings(redis_url="redis://x", trial_tokens=1, trial_s=60)
    hearings = TrialMonitor(yard.scripts, roster, patience, has_suspects=lambda _: False)
    mine = yard.submit()
    yard.scripts.dispatch(yard.token, [mine.to(worker, on_trial=True)])
    write(yard, mine.request, t0=odd, r0=odd, relapsed=odd)
    roster.refresh()

    hearings.run_once(yard.token)

    assert yard.alone(worker) == f"{yard.lane(worker)[0].entry}+1"


@pytest.mark.parametrize("odd", [b"\xff\xfe", "x" * 1000, "normal/1", "normal/1-1\n2"])
def test_invalid_server_id_is_replaced_at_dispatch(yard: PlayedYard, worker: str, odd) -> None:
    # The worker dropped such an entry silently, and the request hung.
    mine = yard.submit(make_request())
    write(yard, mine.request, sid=odd, intake="normal", entry=mine.entry)

    assert yard.place(mine, worker).sid == f"normal/{mine.entry}"


def test_invalid_server_id_is_replaced_in_a_dead_letter(yard: PlayedYard) -> None:
    mine = yard.submit(make_request())
    write(yard, mine.request, sid=b"\xff", intake="normal", entry=mine.entry)

    assert yard.answer(mine, dead="x") is Answered.DONE

    ((_, letter),) = yard.connection.xrange(yard.keys.dead)
    assert letter[b"dead_sid"] == f"normal/{mine.entry}".encode()


def test_oversized_fields_are_not_carried_by_a_retry(yard: PlayedYard, worker: str) -> None:
    # Each retry copied the fields into an intake and onto a lane.
    mine = yard.assign(worker)
    write(yard, mine.request, epoch="7" * 100_000, suspected="9" * 100_000)

    yard.scripts.hand_back(worker, mine, 0, "no memory")

    ((_, fields),) = yard.intake("retry")
    assert sum(map(len, fields.values())) < 10_000
    assert yard.place(yard.waiting(mine.request), worker).first_epoch is None


def test_missing_attempt_stops_no_rescue(yard: PlayedYard, worker: str) -> None:
    mine = yard.assign(worker)
    yard.connection.hdel(yard.keys.ledger(mine.request.client, mine.request.id), "attempt")
    yard.scripts.retire(worker, "lost", "x")

    assert yard.rescue(worker) == 0
    assert yard.waiting(mine.request)


#: Charges that the scripts have not written.
CHARGES = [
    *("", "x", "1", "1 2", "1 2 3", "nan 1 1 acme m", "inf 1 1 acme m", "-5 1 1 acme m"),
    *("0x10 1 1 acme m", "1e300 1 1 acme m", "1 nan 1 acme m", "1 1 1e13 acme m"),
    *("1 1 1 a/b m", "1 1 1 " + "a" * 91 + " m", "1 1 1 acme " + "m" * 1000, b"\xff 1 1 acme m"),
]


@pytest.mark.parametrize("charge", CHARGES)
@pytest.mark.parametrize("how", ["finish", "hand_back", "rescue", "cancel"])
def test_invalid_charge_costs_nobody_anything(
    yard: PlayedYard, worker: str, charge, how: str
) -> None:
    # Given a running request of a tenant, whose client has forged the charge
    yard.connection.zadd(yard.keys.service, {"acme": 500})
    yard.connection.hset(yard.keys.tenant("acme"), "running", 1)
    yard.place(yard.submit(make_request(client="ann", tenant="zeta")), worker)
    (mine,) = yard.lane(worker)
    write(yard, mine.request, charge=charge)

    # If it ends or waits again, I expect that,
    _end(yard, worker, mine, how)

    # and nobody to have been charged.
    assert yard.connection.zscore(yard.keys.service, "acme") == 500
    assert yard.connection.hgetall(yard.keys.usage("acme")) == {}
    assert yard.connection.hget(yard.keys.tenant("acme"), "running") == b"1"


@pytest.mark.parametrize("how", ["finish", "hand_back", "rescue", "cancel"])
def test_forged_charge_moves_a_service_by_no_more_than_a_bound(
    yard: PlayedYard, worker: str, how: str
) -> None:
    yard.connection.zadd(yard.keys.service, {"acme": 500})
    yard.place(yard.submit(make_request(client="ann", tenant="zeta")), worker)
    (mine,) = yard.lane(worker)
    write(yard, mine.request, charge="1e12 1e12 1e12 acme m")

    _end(yard, worker, mine, how)

    assert abs(yard.connection.zscore(yard.keys.service, "acme") - 500) <= 1e12
    assert yard.connection.hget(yard.keys.tenant("acme"), "running") == b"0"


def test_forged_charge_of_a_waiting_request_ends_nothing_that_runs(yard: PlayedYard) -> None:
    yard.connection.hset(yard.keys.tenant("acme"), "running", 1)
    mine = yard.submit(make_request(client="ann", tenant="zeta")).request
    write(yard, mine, charge="10 1 1 acme m")

    assert yard.scripts.cancel(mine.client, mine.id, "x") is Cancelled.CANCELLED

    assert yard.connection.hget(yard.keys.tenant("acme"), "running") == b"1"


@pytest.mark.parametrize("level", ["inf", "-inf", "nan", "1e999", "many"])
def test_forged_place_in_line_moves_no_newcomer(yard: PlayedYard, level: str) -> None:
    # It would have stood behind all others for ever.
    yard.connection.hset(yard.keys.tally, "service_level", level)
    yard.submit(make_request(tenant="acme"))
    assert yard.connection.zscore(yard.keys.line, "acme") == 0


def test_service_that_is_no_number_stops_nobody(yard: PlayedYard, worker: str) -> None:
    # Given infinite service, from which a charge of the other sign makes no number
    yard.submit(make_request(tenant="acme"))
    yard.connection.zadd(yard.keys.service, {"acme": "-inf"})
    yard.connection.zadd(yard.keys.line, {"acme": "inf"})
    yard.connection.hset(yard.keys.tally, "service_level", "nan")

    yard.place(yard.submit(make_request(tenant="acme")), worker)
    yard.submit(make_request(tenant="zeta"))

    assert len(yard.lane(worker)) == 1


def _end(yard: PlayedYard, worker: str, mine: Assignment, how: str) -> None:
    match how:
        case "finish":
            assert yard.finish(worker, mine, [1, 2]) is Published.PUBLISHED
        case "hand_back":
            assert yard.scripts.hand_back(worker, mine, 0, "x") is HandedBack.HANDED_BACK
        case "rescue":
            assert yard.lose(worker) == 0
        case "cancel":
            code = yard.scripts.cancel(mine.request.client, mine.request.id, "x")
            assert code is Cancelled.CANCELLED
