"""As many requests of a tenant run as may."""

from __future__ import annotations

import msgspec
import pytest

from tests.scripts.quota_rig import accept, limit
from tests.scripts.tenant_rig import dispatch, result
from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.scripts.answers import Charge, Dispatched, Move


def charged(waiting: QueuedRequest, worker: str, tenant: str = "acme") -> Move:
    return msgspec.structs.replace(waiting.to(worker), charge=Charge(tenant, 1.0))


class TestRunning:
    def test_no_more_run_than_may(self, yard: PlayedYard, worker: str) -> None:
        limit(yard, max_running_requests=2)
        moves = [charged(accept(yard), worker) for _ in range(4)]

        held = [Dispatched.DISPATCHED] * 2 + [Dispatched.HELD] * 2
        assert yard.scripts.dispatch(yard.token, moves) == held
        assert len(yard.intake("normal:acme")) == 2
        # With each that ends, another may run.
        yard.scripts.finish(worker, [result(yard.lane(worker)[0])])
        assert yard.scripts.dispatch(yard.token, moves[2:]) == held[1:3]
        # Nobody else is held.
        other = yard.submit(make_request("o", tenant="other"))
        assert yard.scripts.dispatch(yard.token, [charged(other, worker, "other")]) == held[:1]

    @pytest.mark.parametrize("how", ["cancel", "lose", "hand_back"])
    def test_who_runs_no_more_makes_room(self, yard: PlayedYard, worker: str, how: str) -> None:
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

    def test_a_retry_is_not_held(self, yard: PlayedYard, worker: str) -> None:
        limit(yard, max_running_requests=1)
        request = dispatch(yard, worker, accept(yard)).request
        yard.lose(worker)
        again = yard.worker("again")
        dispatch(yard, again, accept(yard))
        dispatch(yard, again, yard.waiting(request))
        assert len(yard.lane(again)) == 2
