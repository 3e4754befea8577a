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

import redis
from msgspec import Struct

from benchmarks.chaos.check import History, Story, Violation
from benchmarks.chaos.history import Asked
from tokenyard.protocol.keys import PRIORITY_CLASSES, Keys
from tokenyard.protocol.streams import whole
from tokenyard.protocol.tenants import TenantSettings
from tokenyard.protocol.token_windows import DAY

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
    charged: list[str]  # ledgers with a charge

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


def read_accounts(connection: redis.Redis, keys: Keys) -> Accounts:
    """Read all counters."""
    run: Any = connection
    names = {
        key.decode().removeprefix(prefix)
        for prefix in (keys.tenant(""), keys.usage(""))
        for key in run.scan_iter(f"{prefix}*", count=1000)
    }
    tally = run.hgetall(keys.tally)
    ledgers = run.scan_iter(keys.ledger("*", "*"), count=1000)
    return Accounts(
        tenants={name: _account(run, keys, name) for name in sorted(names)},
        line=[name.decode() for name in run.zrange(keys.line, 0, -1)],
        sums={name: whole(tally.get(name.encode())) for name in _SUMS},
        charged=[key.decode() for key in ledgers if run.hexists(key, "charge")],
    )


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
    owed = used_by_tenant(history)
    found = list(_at_rest(accounts))
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
    account: Account, owed: Counter[str], settings: TenantSettings, lifts: int
) -> Iterator[str]:
    for what in sorted(owed.keys() | account.used.keys() - {"cached"}):
        if account.used[what] != owed[what]:
            yield f"usage {what} is {account.used[what]}, by the results {owed[what]}"
    for what, count in account.present.items():
        if count:
            yield f"{what} is {count} at rest"
    had = (owed["in"] + _OUTPUT_WEIGHT * owed["out"]) / settings.weight
    off = account.service - account.lifted - had
    if not math.isclose(off, 0.0, abs_tol=0.5 * lifts + 1e-3):
        yield f"service without {lifts} lifts is {had + off:.3f}, by the results {had:.3f}"
    tokens = owed["in"] + owed["out"]
    if settings.tokens_per_day and account.window != tokens:
        yield f"tokens of the day are {account.window}, by the results {tokens}"


def used_by_tenant(history: History) -> defaultdict[str, Counter[str]]:
    """What each tenant has used, by its requests and their results."""
    owed: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for story in history.stories.values():
        if story.asked is None or not story.asked.tenant:
            continue
        used = owed[story.asked.tenant]
        used["dispatched"] += any(one.place.startswith(_LANE) for one in story.moved)
        for result in itertools.islice(story.results, 1):
            used["requests"] += 1
            used["out"] += len(result.tokens)
            used["in"] += _tokens_in(story, story.asked)
            if result.status == "cancelled":
                used["cancelled"] += 1
            elif result.status != "completed":
                used["failed"] += 1
                used[f"failed:{result.code}"] += 1
    return owed


def _tokens_in(story: Story, asked: Asked) -> int:
    """The tokens that its prompt counts for.

    By the engine; where it was cancelled, an estimate, unless it waited and no engine had shown a
    token; none where its entry was deleted.
    """
    result = story.results[0]
    if result.prompt_tokens is not None:
        return result.prompt_tokens
    if result.status != "cancelled":
        return 0
    # Copies of a request come into other intakes at any time.
    places = [one.place for one in story.moved if one.place.startswith((_LANE, _RETRY))]
    is_assigned = bool(places) and places[-1] != _RETRY
    return _estimate(asked) if is_assigned or result.tokens else 0


def _estimate(asked: Asked) -> int:
    """Four bytes of text count as a token."""
    text = (asked.text or "").encode()
    return max(1, len(asked.tokens) if asked.tokens is not None else len(text) // 4)
