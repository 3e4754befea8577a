"""register.lua, renew.lua and retire.lua: a worker's lease on its lane."""

from __future__ import annotations

import pytest

from tests.support.builders import worker_json
from tests.support.yard import PlayedYard
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.scripts.worker import RETIRE_UNKNOWN


def lease(yard: PlayedYard, worker: str) -> float | None:
    score = yard.connection.zscore(yard.keys.leases, worker)
    return None if score is None else float(score)


def roster(yard: PlayedYard) -> dict[str, bytes]:
    found = yard.connection.hgetall(yard.keys.workers)
    return {worker.decode(): info for worker, info in found.items()}


def test_worker_joins_with_a_lease_by_the_servers_clock(yard: PlayedYard) -> None:
    before = yard.now_ms

    worker = yard.scripts.register("host-0", 30_000, worker_json("host-0"))

    assert worker == "host-0.1"
    assert roster(yard) == {worker: worker_json("host-0")}
    assert before + 30_000 <= lease(yard, worker) <= yard.now_ms + 30_000
    assert yard.events()[-1] == {b"event": b"joined", b"worker": b"host-0.1"}


def test_every_incarnation_of_a_worker_has_its_own_name(yard: PlayedYard) -> None:
    names = [yard.worker("w"), yard.worker("w"), yard.worker("v")]

    assert names == ["w.1", "w.2", "v.3"]


def test_renewing_extends_the_lease_and_refreshes_the_roster(yard: PlayedYard) -> None:
    worker = yard.worker(lease_ms=1_000)
    draining = worker_json("w", state="draining")

    assert yard.scripts.renew(60_000, [(worker, draining)]) == [True]

    assert lease(yard, worker) > yard.now_ms + 50_000
    assert roster(yard)[worker] == draining


def test_a_changed_entry_wakes_the_leader(yard: PlayedYard) -> None:
    one, two = yard.worker("one"), yard.worker("two")
    before = yard.events()
    entries = [(one, worker_json("one", state="draining")), (two, worker_json("two"))]

    yard.scripts.renew(60_000, entries)
    assert yard.events() == [*before, {b"event": b"changed", b"worker": one.encode()}]

    yard.scripts.renew(60_000, entries)
    assert len(yard.events()) == len(before) + 1, "the same again is no news"


def test_a_changed_tally_is_shown_and_wakes_no_leader(yard: PlayedYard) -> None:
    worker = yard.worker("w")
    first = worker_json("w", tally=WorkerTotals(finished=1, tokens=20, ttft_ms=7.5))
    yard.scripts.renew(60_000, [(worker, first)])
    before = yard.events()

    for entry in (worker_json("w", tally=WorkerTotals(finished=2, tokens=90)), worker_json("w")):
        yard.scripts.renew(60_000, [(worker, entry)])
        assert roster(yard)[worker] == entry
    assert yard.events() == before

    # If its state changes too
    yard.scripts.renew(
        60_000, [(worker, worker_json("w", state="asleep", tally=WorkerTotals(tokens=91)))]
    )
    # I expect an event
    assert len(yard.events()) == len(before) + 1


def test_a_model_with_an_odd_name_is_no_tally(yard: PlayedYard) -> None:
    worker = yard.worker("w")
    yard.scripts.renew(60_000, [(worker, worker_json("w", model=',"tally":{"tokens":1}'))])
    before = yard.events()

    yard.scripts.renew(60_000, [(worker, worker_json("w", model=',"tally":{"tokens":2}'))])

    assert len(yard.events()) == len(before) + 1


def test_the_renewal_of_a_lost_worker_wakes_no_leader(yard: PlayedYard, worker: str) -> None:
    yard.assign(worker)
    yard.scripts.retire(worker, "lost")
    before = yard.events()

    yard.scripts.renew(60_000, [(worker, worker_json(state="draining"))])

    assert yard.events() == before


def test_expired_lease_may_be_renewed_before_its_rescue(yard: PlayedYard, worker: str) -> None:
    yard.expire(worker)

    assert yard.scripts.renew(60_000, [(worker, b"{}")]) == [True]
    assert yard.scripts.rescue(yard.token, worker) == -2


@pytest.mark.parametrize("how", ["unknown", "left", "lost", "rescued"])
def test_removed_lease_cannot_be_renewed(yard: PlayedYard, worker: str, how: str) -> None:
    yard.assign(worker)
    worker = yard.fence(worker, how)
    before = lease(yard, worker), roster(yard)

    assert yard.scripts.renew(60_000, [(worker, b"new")]) == [False]
    assert (lease(yard, worker), roster(yard)) == before


def test_a_lost_lease_does_not_affect_the_renewal_of_others(yard: PlayedYard) -> None:
    one, two = yard.worker("one"), yard.worker("two")
    info = b"{}"

    answers = yard.scripts.renew(60_000, [(one, info), ("nobody.1", info), (two, info)])

    assert answers == [True, False, True]
    assert yard.scripts.renew(60_000, []) == []


def test_retiring_an_unknown_worker_changes_nothing(yard: PlayedYard, worker: str) -> None:
    yard.scripts.retire(worker, "left")
    before = yard.events()

    assert yard.scripts.retire(worker, "left") == RETIRE_UNKNOWN
    assert yard.events() == before
