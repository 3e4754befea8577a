"""A lane session without Redis: requests and replies travel over the controller's pipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tokenyard import clock
from tokenyard.clock import BrokerTime
from worker.engines import EngineInfo, TokenDelta
from worker.messages import Replies
from worker.process.outcomes import Aborted, Outcome, Run, delta_reply, merge, result_reply

#: The incarnation of a worker that belongs to no yard.
LOCAL: Final = "local"


class PipeLaneSession:
    """See `worker.process.lane_session.LaneSession`; the main loop feeds it from the pipe."""

    worker = LOCAL
    attempts = 0

    def __init__(self, info: EngineInfo, send: Callable[[Replies], None]) -> None:
        self.broker_time = BrokerTime()  # no broker: this machine's
        self.runs: dict[str, Run] = {}
        self._info = info
        self._send = send

    def start(self) -> None:
        """There is no thread to start."""

    def put(self, events: Sequence[Outcome], epoch: int | None = None) -> None:
        """Send the replies of one step."""
        now = clock.monotonic()
        replies = []
        for event in merge(events):
            run = self.runs.get(event.key)
            if run is None:
                continue
            if isinstance(event, TokenDelta):
                run.first_token = run.first_token or now
                replies.append((event.key, delta_reply(run, event)))
            else:
                del self.runs[event.key]
                reply = result_reply(run, event, self._info, LOCAL, now, epoch)
                replies.append((event.key, reply))
        if replies:
            self._send(Replies(replies))

    def settle(self, aborted: Aborted) -> None:
        """Nobody pays here."""

    def note_made(self, made: Mapping[str, int]) -> None:
        """Nobody counts here."""

    def end(self) -> None:
        """Drop unanswered requests."""
        self.runs.clear()
