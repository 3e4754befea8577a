"""Cancelling a request wherever it is: directly, or by asking the leader; without I/O."""

from __future__ import annotations

from typing import Final

from tokenyard import clock, scripts
from tokenyard.client.ledger import Cancellation, place_command
from tokenyard.client.operations import Ask, Delay, Steps
from tokenyard.client.state import ClientState
from tokenyard.protocol.errors import WaitTimeout
from tokenyard.protocol.replies import TERMINAL
from tokenyard.scripts import CANCEL_ATTEMPTS, Cancelled, CancelRequested, place_of

#: Pauses between two reads of the ledger while the leader is to cancel a request.
_FIRST_POLL_S: Final = 0.002
_MAX_POLL_S: Final = 0.2
#: The leader that was asked may have died, so the cancel is requested again after this time.
_REPEAT_S: Final = 1.0


class Canceller:
    """Cancels requests of one client."""

    def __init__(self, state: ClientState) -> None:
        self._state = state

    def cancel(self, request_id: str) -> Steps[Cancellation]:
        """Cancel a request; raises `NotPermitted` where this user may not.

        Raises `WaitTimeout` where the request moves faster than it can be read.
        """
        for _ in range(CANCEL_ATTEMPTS):
            state, where = yield from self._place(request_id)
            code = yield scripts.cancel(
                self._state.keys, self._state.client_id, request_id, state=state, where=where
            )
            if code is not Cancelled.MOVED:
                break
        else:
            raise WaitTimeout(f"request {request_id!r} moved all the time; cancel it again")
        if code is Cancelled.CANCELLED_BEFORE_ARRIVAL:
            yield from self._catch_up(request_id)
        return Cancellation[code.name]

    def request_cancel(self, request_id: str) -> Steps[Cancellation]:
        """Have the leader cancel a request; raises `WaitTimeout` where no leader does."""
        state = before = (yield from self._place(request_id))[0]
        give_up = clock.monotonic() + self._state.connect_timeout_s
        repeat_at, pause_s = 0.0, _FIRST_POLL_S
        while state not in TERMINAL:
            now = clock.monotonic()
            # Ask at least once, even where this process was stopped for all that time.
            if (repeat_at and now >= give_up) or self._state.is_closed:
                raise WaitTimeout(f"no coordinator has cancelled request {request_id!r} yet")
            if now >= repeat_at:
                yield from self._ask_leader(request_id)
                repeat_at = now + _REPEAT_S
            yield Delay(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
            state = (yield from self._place(request_id))[0]
        if before in TERMINAL or state != "cancelled":
            return Cancellation.OVER
        yield from self._catch_up(request_id)
        return Cancellation.CANCELLED if before else Cancellation.CANCELLED_BEFORE_ARRIVAL

    def _ask_leader(self, request_id: str) -> Steps[None]:
        state = self._state
        requested = yield scripts.request_cancel(state.keys, state.client_id, request_id)
        if requested is CancelRequested.FULL:
            raise WaitTimeout("too many cancels wait for a coordinator; try again later")

    def _place(self, request_id: str) -> Steps[tuple[str, str]]:
        """State and place of a request, from its ledger."""
        [seen] = yield Ask([place_command(self._state.keys, self._state.client_id, request_id)])
        return place_of(seen)

    def _catch_up(self, request_id: str) -> Steps[None]:
        """Read the result from the ledger, since it may not come on this client's stream."""
        pending = self._state.router.find(request_id)
        if pending is not None:
            yield from self._state.catch_up([pending])
