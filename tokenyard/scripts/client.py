"""The scripts of clients and operators, as calls that any connection can carry out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenyard.protocol.control import Command, DesiredState, Order, encode_desired
from tokenyard.protocol.digest import request_digest
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Keys, PriorityClass, intake_name, is_intake
from tokenyard.protocol.media import MEDIA_TTL_S, NO_MEDIA, Media, encode_media
from tokenyard.protocol.replies import ErrorInfo, json_text
from tokenyard.protocol.wire import (
    DEFAULT_RESULT_TTL_S,
    Request,
    RequestTemplate,
    prompt_value,
    template_of,
)
from tokenyard.scripts.answers import Acceptance, Cancelled, Submitted
from tokenyard.scripts.calls import Arg, Call, Caller, LostLeadership

#: A client with requests that end with it renews its lease three times in this time.
CLIENT_LEASE_MS = 30_000
#: A request seldom moves between the read of its ledger and the call.
CANCEL_ATTEMPTS = 8
#: Most requested cancels of one client, and the time after which unread ones are dropped.
MOST_CANCELS = 10_000
CANCEL_TTL_S = 3600
#: The fields of a ledger that `place_of` reads.
PLACE_FIELDS = ("state", "sid", "intake", "worker", "entry")
_ACCEPTED = Submitted.ACCEPTED
_PLACE = re.compile(r"[A-Za-z0-9_.:@-]+")
_ENTRY = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


def submit(
    keys: Keys,
    priority_class: PriorityClass,
    requests: Sequence[Request],
    *,
    watched: str = "",
    refuse_late: bool = False,
    templates: Sequence[RequestTemplate] | None = None,
    digests: Sequence[str] | None = None,
    media: Sequence[Media] | None = None,
) -> Call[list[Acceptance]]:
    """Accept a burst of requests of one priority class and one tenant, each at most once.

    ``watched`` names the client if its requests are to be cancelled when it disappears. With
    ``refuse_late`` a request that would wait beyond its deadline is refused. ``templates`` and
    ``digests`` are those of the requests, where the caller has them, and ``media`` what they name.
    """
    numbers: dict[RequestTemplate, int] = {}
    args: list[Arg] = []
    ledgers: list[str] = []
    given = zip(
        templates or itertools.repeat(None),
        digests or itertools.repeat(None),
        media or itertools.repeat(NO_MEDIA),
        strict=False,
    )
    for request, (known, digest, named) in zip(requests, given, strict=False):
        template = known or template_of(request)
        number = numbers.setdefault(template, len(numbers) + 1)
        args += (number, request.id, prompt_value(request), digest or request_digest(request))
        args.append(encode_media(named) if named else "")
        ledgers.append(keys.ledger(request.client, request.id))
    intake = intake_name(priority_class, requests[0].tenant if requests else "")
    if intake != priority_class:
        ledgers.append(keys.intake(intake))
    common: list[Arg] = [intake, watched, CLIENT_LEASE_MS, MEDIA_TTL_S, len(numbers)]
    for template in numbers:
        common += (template.field, template.common, template.deadline_ms if refuse_late else 0)
    intakes = [keys.intake(name) for name in ("high", "normal", "low", "retry")]
    shared = [keys.info, *intakes, keys.clients, keys.attached(watched), keys.tally]
    return Call("submit", [*shared, *ledgers], common + args, _acceptances)


def _acceptances(answers: list[list[Any]]) -> list[Acceptance]:
    return [
        Acceptance(_ACCEPTED, answer[1].decode(), "", 0, answer[2], answer[3])
        if answer[0] == _ACCEPTED
        else _other_acceptance(Submitted(answer[0]), *answer[1:])
        for answer in answers
    ]


def _other_acceptance(code: Submitted, value: Any, more: int = 0) -> Acceptance:
    match code:
        case Submitted.KNOWN | Submitted.REUSED:
            return Acceptance(code, state=value.decode())
        case Submitted.FULL:
            return Acceptance(code, retry_after_ms=value)
        case Submitted.QUOTA:
            return Acceptance(code, retry_after_ms=more, limit=value.decode())
        case _:
            return Acceptance(code, eta_ms=value)


def cancel(
    keys: Keys,
    client: str,
    request_id: str,
    *,
    state: str,
    where: str,
    entry: str = "",
    reason: str = "cancelled by the client",
    reply_maxlen: int = 10_000,
) -> Call[Cancelled]:
    """Cancel a request whose ledger has ``state`` ("" where it has no ledger).

    ``where`` comes from `place_of`: the intake of a waiting request, the worker of an assigned one.
    A request without a ledger is cancelled in an intake: ``where`` is that intake, ``entry`` its
    entry. MOVED asks the caller to read the ledger again.
    """
    place = keys.ledger(client, request_id)
    if entry or (state == "waiting" and where):
        place = keys.intake(where)
    elif state == "assigned" and where:
        place = keys.lane(where)
    call_keys = [keys.ledger(client, request_id), keys.tokens(client, request_id), place]
    call_keys += [keys.reply(client, request_id), keys.replies(client), keys.tally, keys.quarantine]
    error = json_text(ErrorInfo(Code.CANCELLED, reason))
    args: list[Arg] = [state, where, request_id, DEFAULT_RESULT_TTL_S, reply_maxlen, error]
    return Call("cancel", call_keys, [*args, entry], Cancelled)


def probe(keys: Keys) -> Call[int]:
    """Check whether the server takes writes; raises redis-py's error where it does not."""
    return Call("probe", [keys.intake("retry")], [], int)


def request_cancel(keys: Keys, client: str, request_id: str) -> Call[bool]:
    """Ask the leader to cancel a request, for a client without permission to `cancel`.

    Returns False where too many cancels of the client wait.
    """
    args: list[Arg] = [client, request_id, MOST_CANCELS, CANCEL_TTL_S]
    return Call("request_cancel", [keys.cancels(client), keys.cancelling], args, bool)


def attend(
    keys: Keys, client: str, ended: Sequence[str], *, lease_ms: int = CLIENT_LEASE_MS
) -> Call[int]:
    """Renew the lease of a client whose requests end with it; returns how many are left.

    With ``lease_ms`` 0 the client leaves: the coordinator cancels the requests that are left.
    """
    call_keys = [keys.clients, keys.attached(client)]
    return Call("attend", call_keys, [client, lease_ms, *ended], int)


def place_of(seen: Sequence[bytes | None]) -> tuple[str, str]:
    """State and place of a request, for `cancel`, from `PLACE_FIELDS` of its ledger.

    The place is "" for a ledger with an invalid one, which a client can write (as in
    `place_of.lua`).
    """
    texts = [(value or b"").decode(errors="replace") for value in seen]
    state, sid, intake, worker, entry = texts
    where = worker if state == "assigned" else ""
    if state == "waiting":
        where, entry = waits_at(sid, intake, entry)
        where = where if is_intake(where) else ""
    is_place = _PLACE.fullmatch(where) and _is_entry(entry)
    return state, where if is_place else ""


def _is_entry(text: str) -> bool:
    """Whether this is a valid entry id: two numbers of 64 bits."""
    return bool(_ENTRY.fullmatch(text)) and all(int(half) < 2**64 for half in text.split("-"))


def waits_at(sid: str, intake: str = "", entry: str = "") -> tuple[str, str]:
    """Intake and entry of a waiting request, from its ledger.

    Until it is handed back they are in its server id, and the ledger has no ``intake``.
    """
    if intake:
        return intake, entry
    intake, _, entry = sid.partition("/")
    return intake, entry


def requeue(keys: Keys, letter: str, client: str, request_id: str, intake: str) -> Call[str]:
    """Queue a dead letter again in an intake (see `intake_name`).

    Returns its new server id, or "" where that is impossible.
    """
    call_keys = [keys.dead, keys.intake(intake), keys.ledger(client, request_id)]
    call_keys += [keys.tokens(client, request_id), keys.reply(client, request_id), keys.tally]
    return Call("requeue", call_keys, [letter, intake], bytes.decode)


class ClientScripts(Caller):
    """Submitting and cancelling over a synchronous connection, and what only operators do."""

    def submit(
        self,
        priority_class: PriorityClass,
        requests: Sequence[Request],
        *,
        watched: str = "",
        refuse_late: bool = False,
    ) -> list[Acceptance]:
        """See `submit`."""
        return self.call(
            submit(self.keys, priority_class, requests, watched=watched, refuse_late=refuse_late)
        )

    def cancel(self, client: str, request_id: str, reason: str) -> Cancelled:
        """Cancel a request wherever it is; MOVED where it moves faster than its ledger is read."""
        ledger = self.keys.ledger(client, request_id)
        for _ in range(CANCEL_ATTEMPTS):
            seen: Any = self.yard.connection.hmget(ledger, *PLACE_FIELDS)
            state, where = place_of(seen)
            code = self.call(
                cancel(
                    self.keys,
                    client,
                    request_id,
                    state=state,
                    where=where,
                    reason=reason,
                    reply_maxlen=self._reply_maxlen,
                )
            )
            if code is not Cancelled.MOVED:
                return code
        return Cancelled.MOVED

    def command(self, command: Command, token: str = "") -> str:
        """Command a worker; returns the command's id.

        The leader passes its ``token``; an operator needs none. Raises `LostLeadership`. A repeated
        call after a lost answer commands twice, which is harmless: all commands are idempotent.
        """
        keys = [self.keys.leader, self.keys.control]
        args: list[Arg] = [token, "command", msgspec.json.encode(command)]
        answer: bytes = self._run("command", keys, args)
        if not answer:
            raise LostLeadership
        return answer.decode()

    def signal(self, order: Order, seen: bytes, now: DesiredState) -> str | None:
        """Change the desired state of the order's scope and announce it; returns the signal's id.

        ``seen`` is the state's JSON as the caller has read it. Returns None where it has changed
        since: read it again. A repeated call after a lost answer also returns None.
        """
        keys = [self.keys.desired, self.keys.control, self.keys.events]
        args: list[Arg] = [order.scope, seen, encode_desired(now)]
        args += ["signal", msgspec.json.encode(order)]
        answer: bytes = self._run("signal", keys, args)
        return answer.decode() or None

    def configure(self, changes: Sequence[tuple[str, bytes, bytes]]) -> bool:
        """Change settings of tenants and announce it: name, JSON as read, new JSON; b"" for none.

        Returns False where one of them has changed since it was read: nothing is written. A
        repeated call after a lost answer also returns False.
        """
        args = [arg for change in changes for arg in change]
        return bool(self._run("configure", [self.keys.tenants, self.keys.events], args))
