"""How a guest reaches the yard: by entries in its inbox, which the leader reads; without I/O.

The answer to an entry comes on the stream of replies, as a receipt.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tokenyard import clock
from tokenyard.client.durability import Durability, durability_error, wait_command
from tokenyard.client.operations import Ask, Command, Delay, Steps
from tokenyard.client.router import ReplyRouter
from tokenyard.protocol.errors import InvalidRequest, NoCoordinator
from tokenyard.protocol.keys import Keys, PriorityClass
from tokenyard.protocol.receipts import MOST_ENDED, Receipt
from tokenyard.protocol.wire import Request, RequestTemplate, prompt_value
from tokenyard.scripts import Acceptance, Submitted

#: Pauses between two checks for receipts.
_FIRST_POLL_S: Final = 0.001
_MAX_POLL_S: Final = 0.02
_CODES: Final = {
    "accepted": Submitted.ACCEPTED,
    "known": Submitted.KNOWN,
    "full": Submitted.FULL,
    "late": Submitted.LATE,
    "reused": Submitted.REUSED,
}


class Guest:
    """One client that uses the inbox of its user."""

    def __init__(self, user: str, client_id: str, keys: Keys, router: ReplyRouter) -> None:
        self._inbox = keys.inbox(user)
        self._client_id = client_id
        self._router = router
        self._run = secrets.token_hex(4)
        self._numbers = itertools.count(1)

    def submit(
        self,
        priority_class: PriorityClass,
        requests: Sequence[Request],
        templates: Sequence[RequestTemplate],
        *,
        is_watched: bool,
        refuse_late: bool,
        durability: Durability,
        timeout_s: float,
    ) -> Steps[tuple[list[Acceptance], str]]:
        """Submit a burst and wait for the leader's receipts.

        Returns the answers, and why the entries are not known to be durable ("" if they are).

        Raises `NoCoordinator` where no receipt comes within ``timeout_s``, and `InvalidRequest`.
        """
        receipts = [f"{self._run}-{next(self._numbers)}" for _ in requests]
        more: dict[str, str | int] = {"class": priority_class}
        more |= {"attach": 1} if is_watched else {}
        more |= {"refuse_late": 1} if refuse_late else {}
        self._router.expect(receipts)
        try:
            wait = wait_command(durability)
            answers: list[Any] = yield Ask(
                [
                    self._add(
                        {
                            "id": request.id,
                            template.field: prompt_value(request),
                            "common": template.common,
                            "receipt": receipt,
                            **more,
                        }
                    )
                    for request, template, receipt in zip(
                        requests, templates, receipts, strict=True
                    )
                ],
                wait,
            )
            not_durable = durability_error(durability, answers[-1]) if wait else ""
            found = yield from self._wait(receipts, timeout_s)
        finally:
            self._router.expect_no_more(receipts)
        return [_acceptance(receipt) for receipt in found], not_durable

    def _wait(self, receipts: Sequence[str], timeout_s: float) -> Steps[list[Receipt]]:
        give_up, pause_s = clock.monotonic() + timeout_s, _FIRST_POLL_S
        while (found := self._router.receipts(receipts)) is None:
            if clock.monotonic() >= give_up:
                raise NoCoordinator(
                    f"no coordinator has read the requests from the inbox within {timeout_s:g} s;"
                    " one may do so later: submit them again with the same ids"
                )
            yield Delay(pause_s)
            pause_s = min(1.5 * pause_s, _MAX_POLL_S)
        return found

    def cancel(self, request_id: str) -> Ask:
        """Request a cancel; the ledger shows when it is done."""
        return Ask([self._add({"do": "cancel", "client": self._client_id, "id": request_id})])

    def attend(self, ended: Sequence[str], *, leaves: bool = False) -> Ask:
        """Renew this client's lease, or end it, and report which of its requests have ended."""
        parts = [ended[at : at + MOST_ENDED] for at in range(0, len(ended), MOST_ENDED)] or [[]]
        entries: list[dict[str, Any]] = [
            {"do": "attend", "client": self._client_id, "ended": msgspec.json.encode(part)}
            for part in parts
        ]
        if leaves:
            entries[-1]["leave"] = 1
        return Ask([self._add(entry) for entry in entries])

    def _add(self, fields: Mapping[str, str | bytes | int]) -> Command:
        return ("XADD", self._inbox, "*", *itertools.chain.from_iterable(fields.items()))


def _acceptance(receipt: Receipt) -> Acceptance:
    if receipt.limit:
        retry_after_ms = receipt.retry_after_ms if receipt.code == "full" else -1
        return Acceptance(Submitted.QUOTA, retry_after_ms=retry_after_ms, limit=receipt.limit)
    if receipt.code == "invalid":
        field, _, message = receipt.message.partition(": ")
        raise InvalidRequest(field, message)
    return Acceptance(
        _CODES[receipt.code],
        receipt.sid,
        receipt.state,
        receipt.retry_after_ms,
        receipt.position,
        receipt.eta_ms,
    )
