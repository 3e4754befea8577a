"""How a client speaks that is not trusted: by entries of its inbox, which the leader empties.

No I/O here. What became of an entry comes back on the stream of replies, as a receipt.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from tokenyard.client.durability import Durability, wait_command, why_not
from tokenyard.client.operations import Ask, Command, Pause, Steps
from tokenyard.client.router import ReplyRouter
from tokenyard.protocol.errors import InvalidRequest, NoCoordinator
from tokenyard.protocol.keys import Keys, PriorityClass
from tokenyard.protocol.receipts import MOST_ENDED, Receipt
from tokenyard.protocol.wire import Request, RequestTemplate, prompt_value
from tokenyard.scripts import Acceptance, Submitted

#: Between looks whether receipts have come.
_FIRST_LOOK_S: Final = 0.001
_LONGEST_LOOK_S: Final = 0.02
_CODES: Final = {
    "accepted": Submitted.ACCEPTED,
    "known": Submitted.KNOWN,
    "full": Submitted.FULL,
    "late": Submitted.LATE,
    "reused": Submitted.REUSED,
}


class Guest:
    """One client's way through the inbox of its user."""

    def __init__(self, user: str, client_id: str, keys: Keys, session: ReplyRouter) -> None:
        self._inbox = keys.inbox(user)
        self._client_id = client_id
        self._session = session
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
        patience_s: float,
    ) -> Steps[tuple[list[Acceptance], str]]:
        """Submit a burst, and wait for what the leader says of each.

        With why the entries of the inbox are not known to be as safe as was asked for, or "".

        Raises `NoCoordinator` where it says nothing for so long, `InvalidRequest` for one that it
        cannot read.
        """
        receipts = [f"{self._run}-{next(self._numbers)}" for _ in requests]
        more: dict[str, str | int] = {"class": priority_class}
        more |= {"attach": 1} if is_watched else {}
        more |= {"refuse_late": 1} if refuse_late else {}
        self._session.expect(receipts)
        try:
            wait = wait_command(durability)
            answers: list[Any] = yield Ask(
                [
                    self._add(
                        {
                            "id": request.id,
                            template.field: prompt_value(request),
                            "shared": template.common,
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
            why = why_not(durability, answers[-1]) if wait else ""
            found = yield from self._wait(receipts, patience_s)
        finally:
            self._session.expect_no_more(receipts)
        return [_acceptance(receipt) for receipt in found], why

    def _wait(self, receipts: Sequence[str], patience_s: float) -> Steps[list[Receipt]]:
        give_up, pause_s = time.monotonic() + patience_s, _FIRST_LOOK_S
        while (found := self._session.receipts(receipts)) is None:
            if time.monotonic() >= give_up:
                raise NoCoordinator(
                    f"nobody has taken the requests out of the inbox within {patience_s:g} s; they"
                    " may be taken later: submit them again with the same ids"
                )
            yield Pause(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_LOOK_S)
        return found

    def cancel(self, request_id: str) -> Ask:
        """Ask for a request to be cancelled; its ledger shows when that is done."""
        return Ask([self._add({"do": "cancel", "client": self._client_id, "id": request_id})])

    def attend(self, ended: Sequence[str], *, leaves: bool = False) -> Ask:
        """Say that this client is there, or leaves, and which of its requests have ended."""
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
