"""What a yard counts for its tenants at rest, compared with what the history says.

The broker of a run loses no acknowledged write, so every counter must be exact, whatever died.
Only what rest has lifted the service of a tenant by is kept in whole tokens, so that each time may
hide half a token.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from benchmarks.chaos.check import History, Story, Violation
from benchmarks.chaos.history import Asked
from tokenyard.protocol.keys import PRIORITY_CLASSES, Keys, Yard
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import DAY, TenantSettings

#: Weighted tokens for one token out; one in counts as one.
_OUTPUT_WEIGHT: Final = 2
#: More than all requests of a run may use.
_MANY_TOKENS: Final = 10**9
_MOST_RUNNING: Final = 12
#: Counts of what waits or runs, all 0 at rest.
_PRESENT: Final = (
    "running",
    "waiting",
    "waiting_tokens",
    *map("waiting:{}".format, PRIORITY_CLASSES),
)
_SUMS: Final = ("tenants_waiting", *map("tenants_waiting:{}".format, PRIORITY_CLASSES))
_WAIT: Final = "wait:"  # the counts of first dispatches
_LANE: Final = "lane:"
_RETRY: Final = "intake:retry"


class Account(Struct):
    """What the yard counts for one tenant."""

    used: Counter[str]  # over days and models; `dispatched` is the sum of the waits
    present: dict[str, int]
    service: float
    lifted: int
    window: int  # tokens that count for its limit of a day


class Accounts(Struct):
    """What the yard counts for all tenants."""

    tenants: dict[str, Account]
    line: list[str]
    sums: dict[str, int]
    charged: list[str]  # ledgers with a charge that somebody should settle

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing waits or runs."""
        counts = [*self.sums.values()]
        counts += [count for one in self.tenants.values() for count in one.present.values()]
        return not (self.line or self.charged or any(counts))


def tenants_of_a_run(count: int) -> dict[str, TenantSettings]:
    """Tenants with weights 1, 2 and 4 in turn; each third one has limits that hold some back."""
    limits = TenantSettings(
        weight=4, max_running_requests=_MOST_RUNNING, tokens_per_day=_MANY_TOKENS
    )
    kinds = (TenantSettings(weight=1), TenantSettings(weight=2), limits)
    return {f"tenant-{number}": kinds[number % 3] for number in range(count)}


def read_accounts(yard: Yard) -> Accounts:
    """Read all counters."""
    run: Any = yard.connection
    names = {
        key.decode().removeprefix(prefix)
        for prefix in (yard.keys.tenant(""), yard.keys.usage(""))
        for key in run.scan_iter(f"{prefix}*", count=1000)
    }
    tally = run.hgetall(yard.keys.tally)
    ledgers = run.scan_iter(yard.keys.ledger("*", "*"), count=1000)
    return Accounts(
        tenants={name: _account(run, yard.keys, name) for name in sorted(names)},
        line=[name.decode() for name in run.zrange(yard.keys.line, 0, -1)],
        sums={name: whole(tally.get(name.encode())) for name in _SUMS},
        charged=[key.decode() for key in ledgers if _is_charged(run, yard.keys, key)],
    )


def _is_charged(run: Any, keys: Keys, ledger: bytes) -> bool:
    """Whether there is a charge, and not the estimate of a cancelled request of a lost worker."""
    charge, state, worker = run.hmget(ledger, "charge", "state", "worker")
    if charge is None or state != b"cancelled":
        return charge is not None
    lease: float | None = run.zscore(keys.leases, worker or "")
    return lease is not None and lease > 0


def _account(run: Any, keys: Keys, name: str) -> Account:
    counts = {one.decode(): value for one, value in run.hgetall(keys.tenant(name)).items()}
    used: Counter[str] = Counter()
    for field, value in run.hgetall(keys.usage(name)).items():
        what = field.decode().rpartition(" ")[2]
        used["dispatched" if what.startswith(_WAIT) else what] += whole(value)
    seconds, micros = run.time()
    window = [counts.get(field) for field in DAY.fields]
    return Account(
        used,
        {what: whole(counts.get(what)) for what in _PRESENT},
        float(run.zscore(keys.service, name) or 0.0),
        whole(counts.get("lifted")),
        DAY.read(window, seconds * 1000 + micros // 1000)[0],
    )


def check_accounts(
    history: History, accounts: Accounts, tenants: Mapping[str, TenantSettings]
) -> list[Violation]:
    """Find all counters that differ from the history."""
    weights = {name: settings.weight for name, settings in tenants.items()}
    owed = used_by_tenant(history, weights)
    found = list(_at_rest(accounts))
    for key, story in history.stories.items():
        found += [Violation("count", key, line) for line in _faults_of_payment(story)]
    # Requests without a tenant are charged only while others wait.
    for name in sorted((owed.keys() | accounts.tenants.keys()) - {""}):
        account = accounts.tenants.get(name) or Account(Counter(), {}, 0.0, 0, 0)
        settings = tenants.get(name, TenantSettings())
        lines = _differences(account, owed[name], settings, history.lifts[name])
        found += [Violation("count", (name, ""), line) for line in lines]
    return found


def _at_rest(accounts: Accounts) -> Iterator[Violation]:
    whose = ("tenants", "")
    if accounts.line:
        yield Violation("count", whose, f"the line has {accounts.line}")
    for what, count in accounts.sums.items():
        if count:
            yield Violation("count", whose, f"{what} is {count} at rest")
    for ledger in accounts.charged:
        yield Violation("count", whose, f"{ledger} still has a charge")


def _differences(
    account: Account, owed: Owed, settings: TenantSettings, lifts: int
) -> Iterator[str]:
    for what in sorted(owed.used.keys() | account.used.keys() - {"cached"}):
        if account.used[what] != owed.used[what]:
            yield f"usage {what} is {account.used[what]}, by the results {owed.used[what]}"
    for what, count in account.present.items():
        if count:
            yield f"{what} is {count} at rest"
    off = account.service - account.lifted - owed.service
    if not math.isclose(off, 0.0, abs_tol=0.5 * lifts + 1e-3):
        had = owed.service
        yield f"service without {lifts} lifts is {had + off:.3f}, by the results {had:.3f}"
    if settings.tokens_per_day and account.window != owed.window:
        yield f"tokens of the day are {account.window}, by the results {owed.window}"


class Owed(Struct):
    """What the counters of a tenant should be."""

    used: Counter[str] = msgspec.field(default_factory=Counter)
    service: float = 0.0
    window: int = 0


def used_by_tenant(history: History, weights: Mapping[str, float]) -> defaultdict[str, Owed]:
    """What each tenant has used, by its requests and their results."""
    owed: defaultdict[str, Owed] = defaultdict(Owed)
    for story in history.stories.values():
        if story.asked is None or not story.asked.tenant:
            continue
        one = owed[story.asked.tenant]
        one.used["dispatched"] += any(move.place.startswith(_LANE) for move in story.moved)
        for result in itertools.islice(story.results, 1):
            one.used["requests"] += 1
            if result.status == "cancelled":
                one.used["cancelled"] += 1
            elif result.status != "completed":
                one.used["failed"] += 1
                one.used[f"failed:{result.code}"] += 1
            _add_tokens(one, story, story.asked, weights.get(story.asked.tenant, 1.0))
    return owed


def _add_tokens(owed: Owed, story: Story, asked: Asked, weight: float) -> None:
    """The tokens of a request that is over."""
    result = story.results[0]
    tokens_in, tokens_out = _tokens_in(story, asked), len(result.tokens)
    if len(story.paid) == 1:
        # Its worker was lost before it could say more: what was charged and reserved remains.
        owed.used["out"] += tokens_out
        owed.service += story.charged[-1].amount if story.charged else 0.0
        owed.window += _estimate(asked) + asked.max_tokens
        return
    if story.paid:
        tokens_in, tokens_out = story.paid[-1].input, story.paid[-1].output
    owed.used["in"] += tokens_in
    owed.used["out"] += tokens_out
    owed.service += (tokens_in + _OUTPUT_WEIGHT * tokens_out) / weight
    owed.window += tokens_in + tokens_out


def _faults_of_payment(story: Story) -> Iterator[str]:
    """What is wrong with that which a cancelled request has paid."""
    if story.asked is None or not story.results or not (story.charged or story.paid):
        return
    result = story.results[0]
    if result.status != "cancelled":
        if story.paid:
            yield f"a request that is {result.status} has paid as if cancelled"
        return
    if _is_assigned(story) != bool(story.paid):
        yield f"cancelled {'on a lane' if _is_assigned(story) else 'in an intake'}: {story.paid}"
    if len(story.paid) > 2:
        yield f"paid {len(story.paid) - 1} times"
    for one in story.paid:
        if not len(result.tokens) <= one.output <= story.asked.max_tokens:
            shown, most = len(result.tokens), story.asked.max_tokens
            yield f"paid {one.output} tokens out of {most}, of which {shown} were published"
        if not _estimate(story.asked) <= one.input <= _most_tokens(story.asked):
            yield f"paid {one.input} tokens in, estimated {_estimate(story.asked)}"


def _tokens_in(story: Story, asked: Asked) -> int:
    """The tokens that its prompt counts for, unless a worker has said so.

    By the engine; where it was cancelled while it waited, an estimate if an engine had shown a
    token; none where its entry was deleted.
    """
    result = story.results[0]
    if result.prompt_tokens is not None:
        return result.prompt_tokens
    return _estimate(asked) if result.status == "cancelled" and result.tokens else 0


def _is_assigned(story: Story) -> bool:
    """Whether it was on a lane last. Copies of a request come into other intakes at any time."""
    places = [one.place for one in story.moved if one.place.startswith((_LANE, _RETRY))]
    return bool(places) and places[-1] != _RETRY


def _most_tokens(asked: Asked) -> int:
    """A token of a text has a byte at least."""
    return len(asked.tokens) if asked.tokens is not None else len((asked.text or "").encode())


def _estimate(asked: Asked) -> int:
    """Four bytes of text count as a token."""
    text = (asked.text or "").encode()
    return max(1, len(asked.tokens) if asked.tokens is not None else len(text) // 4)
