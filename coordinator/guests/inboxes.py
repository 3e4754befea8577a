"""Reads the inboxes of guests, and carries out their commands as a trusted client would.

A guest is a user of the server that may write one stream. That stream is not read directly:
`collect` returns a bounded part of it. A guest that exceeds a limit is cut off: for some time its
inbox is deleted unread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import redis

from coordinator.guests.commands import (
    CancelCommand,
    GuestCommand,
    LeaseRenewal,
    ReplyAddress,
    Submission,
    Unreadable,
    parse_guest_command,
)
from coordinator.guests.inbox_watcher import InboxWatcher
from coordinator.telemetry.counts import CoordinatorCounts
from tokenyard import clock
from tokenyard.protocol.errors import Code, quota_exceeded
from tokenyard.protocol.keys import INTAKE_CLASSES, TENANTS_WAITING, Keys
from tokenyard.protocol.parse import parse_id
from tokenyard.protocol.receipts import Receipt, ReceiptCode
from tokenyard.protocol.replies import ErrorInfo, Reply, json_text, status_of
from tokenyard.protocol.settings import LEAST_GUEST_TTL_S, CoordinatorSettings
from tokenyard.scripts import (
    CLIENT_LEASE_MS,
    Acceptance,
    Cancelled,
    Haul,
    Notice,
    Scripts,
    Submitted,
    attend,
    submit,
)

log = logging.getLogger("tokenyard.coordinator.inboxes")

#: Entries of one inbox that one turn takes.
MOST_ENTRIES: Final = 256
#: After a turn the inboxes rest for so many times as long, so that a flood leaves most of the
#: leader's time to others.
RESTS: Final = 3
#: The answer where the guests' share of the queue is full.
RETRY_AFTER_MS: Final = 1_000

_CODES: Final[dict[Submitted, ReceiptCode]] = {
    Submitted.ACCEPTED: "accepted",
    Submitted.KNOWN: "known",
    Submitted.FULL: "full",
    Submitted.LATE: "late",
    Submitted.REUSED: "reused",
    Submitted.QUOTA: "full",
}
_UNDER_WAY: Final = (b"waiting", b"assigned")
_FULL: Final = Acceptance(Submitted.FULL, retry_after_ms=RETRY_AFTER_MS)


class Inboxes:
    """The guests of one yard."""

    def __init__(
        self,
        connection: redis.Redis,
        scripts: Scripts,
        keys: Keys,
        settings: CoordinatorSettings,
        counts: CoordinatorCounts,
    ) -> None:
        self._connection = connection
        self._scripts = scripts
        self._keys = keys
        self._guests: Sequence[str] = tuple(dict.fromkeys(settings.guests))
        self._watcher = InboxWatcher(settings.redis_url, keys, self._guests)
        self._settings = settings
        self._counts = counts
        self._most_waiting = int(settings.max_num_queued_reqs * settings.guest_queue_share)
        self._turn = 0
        self._tenants: dict[str, int] = {}  # guests that are tenants, to how much of them waits
        self._cut_off: dict[str, float] = {}  # guest to the end of its cut-off (monotonic)
        self._rests: dict[str, float] = {}  # guest to when its inbox is tried again (monotonic)

    def run_once(self) -> None:
        """Read the inboxes that were written."""
        if not self._guests:
            return
        now = clock.monotonic()
        wrote = self._watcher.take()
        if not wrote:
            return
        room = self._look(wrote)
        for left, guest in zip(range(len(wrote), 0, -1), self._in_turn(wrote), strict=True):
            # A guest that floods must not take all of the room.
            own = room / left
            if guest in self._tenants:  # and a tenant, over time, leaves as much as it has
                own = min(own, (room - self._tenants[guest]) / 2)
            room -= self._read(guest, max(0, math.ceil(own)), now)
        self._watcher.rest((clock.monotonic() - now) * RESTS)

    def _in_turn(self, written: Sequence[str]) -> Sequence[str]:
        """The same guests, each time with another one first."""
        self._turn += 1
        first = self._turn % max(1, len(written))
        return (*written[first:], *written[:first])

    def stop(self) -> None:
        """Stop watching; idempotent."""
        self._watcher.stop()

    def _read(self, guest: str, room: int, now: float) -> int:
        """Read one inbox; the number of submitted requests. An error stops no other guest."""
        if now < self._cut_off.get(guest, 0.0):
            self._connection.unlink(self._keys.inbox(guest))
            return 0
        if now < self._rests.get(guest, 0.0):
            return 0
        try:
            return self._take(guest, room)
        except redis.ResponseError as error:
            self._rests[guest] = now + self._settings.guest_cut_off_s
            self._counts.found_bad("inbox")
            log.warning("the inbox of guest %s cannot be read: %s", guest, error)
            return 0

    def _take(self, guest: str, room: int) -> int:
        [haul] = self._scripts.collect(
            [guest],
            most_memory=self._settings.guest_inbox_bytes,
            most_bytes=self._settings.max_request_bytes,
            most_entries=MOST_ENTRIES,
        )
        self._enforce_limits(guest, haul)
        return self._serve(guest, haul, room) if haul.entries else 0

    def _look(self, written: Sequence[str]) -> int:
        """Note which guests are tenants; returns how many more requests may wait."""
        pipeline = self._connection.pipeline(transaction=False)
        for name in INTAKE_CLASSES:
            pipeline.xlen(self._keys.intake(name))
        pipeline.hget(self._keys.tally, TENANTS_WAITING)
        for guest in written:
            pipeline.hget(self._keys.tenants, guest)
            pipeline.hget(self._keys.tenant(guest), "waiting")
        *waiting, of_tenants = (found := pipeline.execute())[: len(INTAKE_CLASSES) + 1]
        known, counts = found[len(INTAKE_CLASSES) + 1 :: 2], found[len(INTAKE_CLASSES) + 2 :: 2]
        self._tenants = {
            guest: _count(count)
            for guest, packed, count in zip(written, known, counts, strict=True)
            if packed is not None
        }
        taken: int = sum(waiting) + _count(of_tenants)
        return self._most_waiting - taken

    def _enforce_limits(self, guest: str, haul: Haul) -> None:
        """Cut a guest off whose inbox, or an entry in it, was too large."""
        if haul.overrun:
            self._cut(guest, f"its inbox took {haul.overrun} bytes")
        if haul.deleted:
            self._counts.found_bad("inbox", haul.deleted)
            self._cut(guest, f"{haul.deleted} entries were too long or had too many fields")

    def _cut(self, guest: str, why: str) -> None:
        self._counts.found_bad("inbox")
        self._cut_off[guest] = clock.monotonic() + self._settings.guest_cut_off_s
        log.warning("guest %s is cut off for %g s: %s", guest, self._settings.guest_cut_off_s, why)

    def _serve(self, guest: str, haul: Haul, room: int) -> int:
        """Carry out the commands of a guest; the number of submitted requests."""
        tenant = guest if guest in self._tenants else ""
        most_ttl_s = self._settings.guest_result_ttl_s
        commands = [
            parse_guest_command(guest, fields, most_ttl_s, tenant) for _, fields in haul.entries
        ]
        notices = list(self._refusals(guest, commands))
        submissions = [one for one in commands if isinstance(one, Submission)]
        for submission, acceptance in self._submit(submissions[:room]):
            notices += _notices(submission.address, acceptance)
        for submission in submissions[room:]:
            notices += _notices(submission.address, _FULL)
        self._cancel(one for one in commands if isinstance(one, CancelCommand))
        self._renew_leases(one for one in commands if isinstance(one, LeaseRenewal))
        self._scripts.settle(guest, [entry for entry, _ in haul.entries], notices)
        return min(room, len(submissions))

    def _refusals(self, guest: str, commands: Iterable[GuestCommand]) -> Iterable[Notice]:
        for command in commands:
            if isinstance(command, Unreadable):
                self._counts.found_bad("inbox")
                log.debug("an entry of guest %s is refused: %s", guest, command.reason)
                if command.address is not None:
                    yield from _invalid(command.address, command.reason)

    def _submit(self, submissions: Iterable[Submission]) -> Iterable[tuple[Submission, Acceptance]]:
        """Submit requests, those of one class, tenant and watched client in one call."""
        groups: dict[tuple[str, str, str], list[Submission]] = {}
        for one in submissions:
            key = (one.priority_class, one.request.tenant, one.watched)
            groups.setdefault(key, []).append(one)
        for group in groups.values():
            answers = self._scripts.call(
                submit(
                    self._keys,
                    group[0].priority_class,
                    [one.request for one in group],
                    watched=group[0].watched,
                    refuse_late=True,  # where the template has a deadline
                    templates=[one.template for one in group],
                    digests=[one.digest for one in group],
                )
            )
            if group[0].watched:
                self._forget_ended(group[0].watched, 2 * len(group))
            yield from zip(group, answers, strict=True)

    def _forget_ended(self, client: str, most: int) -> None:
        """Detach requests that are over, though the guest has not reported it.

        A sample of twice as many as were submitted, so at most half of the set is over in the end.
        """
        attached = self._keys.attached(client)
        sample: Any = self._connection.srandmember(attached, most)
        pipeline = self._connection.pipeline(transaction=False)
        for raw in sample:
            pipeline.hget(self._keys.ledger(client, parse_id(raw) or ""), "state")
        states = pipeline.execute()
        over = [raw for raw, state in zip(sample, states, strict=True) if state not in _UNDER_WAY]
        if over:
            self._connection.srem(attached, *over)

    def _cancel(self, commands: Iterable[CancelCommand]) -> None:
        for command in commands:
            code = self._scripts.cancel(
                command.client,
                command.request_id,
                "cancelled by the client",
                unknown_ttl_s=LEAST_GUEST_TTL_S,  # made-up ids take memory only for a short time
            )
            if code is Cancelled.MOVED:
                log.info("%s/%s moves too fast to be cancelled", command.client, command.request_id)

    def _renew_leases(self, commands: Iterable[LeaseRenewal]) -> None:
        for command in commands:
            lease_ms = 0 if command.leaves else CLIENT_LEASE_MS
            self._scripts.call(attend(self._keys, command.client, command.ended, lease_ms=lease_ms))


def _count(raw: bytes | None) -> int:
    """A counter; 0 where it is none."""
    return int(raw) if raw and raw.isdigit() and len(raw) < 16 else 0


def _notices(address: ReplyAddress, acceptance: Acceptance) -> list[Notice]:
    """The answer to a submitted request: a receipt, or a refusal as a result."""
    limit, retry_after_s = acceptance.limit, acceptance.retry_after_s
    message = quota_exceeded(limit, retry_after_s) if limit else ""
    if address.receipt:
        receipt = Receipt(
            address.receipt,
            "invalid" if retry_after_s is None else _CODES[acceptance.code],
            acceptance.sid,
            acceptance.position,
            acceptance.eta_ms,
            max(0, acceptance.retry_after_ms),
            acceptance.state,
            message,
            limit,
        )
        return [_notice(address, receipt)]
    if limit:
        return [_result(address, Code.QUOTA_EXCEEDED, message)]
    if acceptance.code is Submitted.FULL:
        seconds = acceptance.retry_after_ms / 1000
        return [_result(address, Code.QUEUE_FULL, f"the queue is full; try again in {seconds:g} s")]
    if acceptance.code is Submitted.LATE:
        return [_result(address, Code.DEADLINE_EXCEEDED, "it would wait beyond its deadline")]
    return []


def _invalid(address: ReplyAddress, reason: str) -> list[Notice]:
    if address.receipt:
        return [_notice(address, Receipt(address.receipt, "invalid", message=reason))]
    return [_result(address, Code.INVALID_REQUEST, reason)]


def _notice(address: ReplyAddress, receipt: Receipt) -> Notice:
    reply = Reply(
        id=address.request_id, event="receipt", seq=0, tokens=b"", receipt=json_text(receipt)
    )
    return Notice(address.client, address.kind, reply)


def _result(address: ReplyAddress, code: Code, message: str) -> Notice:
    error: Any = json_text(ErrorInfo(code, message))
    reply = Reply(
        id=address.request_id,
        event="result",
        seq=0,
        tokens=b"",
        status=status_of(code),
        error=error,
    )
    return Notice(address.client, address.kind, reply)
