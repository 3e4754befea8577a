"""The checker of tenants' counters in the chaos benchmark must find each count that is off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from benchmarks.chaos.accounts import Account, Accounts, check_accounts, tenants_of_a_run
from benchmarks.chaos.answers import Answer
from benchmarks.chaos.check import check, gather
from benchmarks.chaos.history import Asked, Charged, Event, Lifted, Moved, Paid, Published
from tokenyard.protocol.tenants import TenantSettings

C, ACME = "client-0", "acme"
SETTINGS = {ACME: TenantSettings(weight=2, tokens_per_day=10**9)}


def ended(
    number: int,
    *places: str,
    status: str = "completed",
    shown: int = 6,
    prompt_tokens: int | None = None,
    tenant: str = ACME,
    text: str | None = None,
    code: str = "",
) -> list[Event]:
    """A request of 4 prompt tokens that came to these places, and its result."""
    request = f"1-{number}"
    prompt = None if text is not None else [1, 2, 3, 4]
    asked = Asked(99.0, C, request, 6, stream=True, tokens=prompt, text=text, tenant=tenant)
    result = Published(100.0, C, request, "result", 0, [7] * shown, status)
    moves = [Moved(99.5, C, request, place, tenant) for place in places]
    result = msgspec.structs.replace(result, prompt_tokens=prompt_tokens, code=code)
    return [asked, *moves, result]


def load() -> list[Event]:
    """One request for each way in which tokens come into the counters."""
    return [
        *ended(1, "intake:normal:acme", "lane:w.1", prompt_tokens=5),
        # Cancelled: on a lane; while it waited, never shown; while it waited again, and shown
        *ended(2, "intake:normal:acme", "lane:w.1", "intake:low:acme", status="cancelled", shown=1),
        Paid(C, "1-2", 4, 1),
        Paid(C, "1-2", 4, 5),
        *ended(3, "intake:normal:acme", status="cancelled", shown=0),
        *ended(4, "lane:w.1", "intake:retry", status="cancelled", shown=0),
        *ended(5, "lane:w.1", "intake:retry", status="cancelled", shown=3, text="twelve bytes"),
        # Its entry was deleted while it waited again.
        *ended(6, "lane:w.1", "intake:retry", status="failed", shown=2, code="ENTRY_LOST"),
        *ended(7, "intake:normal", "lane:w.1", prompt_tokens=4, tenant=""),
        # Cancelled on a lane whose worker died then
        *ended(8, "lane:w.1", status="cancelled", shown=2),
        Paid(C, "1-8", 4, 2),
        *(Charged(C, f"1-{number}", ACME, 14.0) for number in (1, 2, 4, 5, 6, 8)),
        Lifted(ACME),
    ]


def exact() -> Accounts:
    """What the yard must have counted for that: 5 + 4 + 3 tokens in, 6 + 5 + 3 + 2 + 2 out.

    The last two of these are in the estimate, which remains: 14 for 4 tokens in and 6 out at most.
    """
    used = Counter({"requests": 7, "in": 12, "out": 18, "dispatched": 6})
    used.update({"cancelled": 5, "failed": 1, "failed:ENTRY_LOST": 1, "cached": 3})
    service = (12 + 2 * 16) / 2 + 14.0
    account = Account(used, {"running": 0}, service + 100.4, lifted=100, window=12 + 16 + 10)
    return Accounts({ACME: account}, [], {"tenants_waiting": 0}, [])


def found(change: Callable[[Accounts], object]) -> list[str]:
    accounts = exact()
    change(accounts)
    return [one.what for one in check_accounts(gather(load()), accounts, SETTINGS)]


def test_exact_counters_have_no_faults() -> None:
    assert found(lambda _: None) == []
    assert exact().is_at_rest


@pytest.mark.parametrize(
    "what",
    ["requests", "in", "out", "cancelled", "failed", "failed:ENTRY_LOST", "dispatched"],
)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_count_of_the_usage_that_is_off_is_a_fault(what: str, off: int) -> None:
    [line] = found(lambda accounts: accounts.tenants[ACME].used.update({what: off}))

    assert line.startswith(f"usage {what} is ")


def test_what_remains_at_rest_is_a_fault() -> None:
    assert found(lambda all_: all_.tenants[ACME].present.update(running=1)) == [
        "running is 1 at rest"
    ]
    assert found(lambda all_: all_.sums.update(tenants_waiting=-1)) == [
        "tenants_waiting is -1 at rest"
    ]
    assert found(lambda all_: all_.line.append(ACME)) == ["the line has ['acme']"]
    assert found(lambda all_: all_.charged.append("ledger")) == ["ledger still has a charge"]


@pytest.mark.parametrize("off", [-1.0, 0.2, 1.0])
def test_a_service_that_is_off_is_a_fault(off: float) -> None:
    """The lift hides 0.4 tokens, and may hide half a token."""

    def change(accounts: Accounts) -> None:
        accounts.tenants[ACME].service += off

    [line] = found(change)
    assert line.startswith("service without 1 lifts is ")


def test_a_window_that_is_off_is_a_fault() -> None:
    def change(accounts: Accounts) -> None:
        accounts.tenants[ACME].window -= 1

    assert found(change) == ["tokens of the day are 37, by the results 38"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (Paid(C, "1-1", 4, 6), "a request that is completed has paid as if cancelled"),
        (Paid(C, "1-3", 4, 0), "cancelled in an intake: "),
        (Paid(C, "1-4", 4, 0), "cancelled in an intake: "),
        (Paid(C, "1-2", 4, 5), "paid 2 times"),
        (Paid(C, "1-8", 4, 1), "paid 1 tokens out of 6, of which 2 were published"),
        (Paid(C, "1-8", 4, 7), "paid 7 tokens out of 6, of which 2 were published"),
        (Paid(C, "1-8", 3, 6), "paid 3 tokens in, estimated 4"),
        (Paid(C, "1-8", 5, 6), "paid 5 tokens in, estimated 4"),
    ],
)
def test_a_payment_that_cannot_be_is_a_fault(change: Paid, what: str) -> None:
    history = gather([*load(), change])
    lines = [one.what for one in check_accounts(history, exact(), SETTINGS) if one.key[0] == C]

    assert lines
    assert all(line.startswith(what) for line in lines)


def test_a_cancelled_request_of_which_nobody_says_what_it_used_is_a_fault() -> None:
    history = gather([one for one in load() if not isinstance(one, Paid)])
    lines = [one.what for one in check_accounts(history, exact(), SETTINGS) if one.key[0] == C]

    assert lines == ["cancelled on a lane: []"] * 2


def test_a_report_of_a_worker_that_the_counters_lack_is_a_fault() -> None:
    history = gather([*load(), Paid(C, "1-8", 4, 6)])
    lines = [one.what for one in check_accounts(history, exact(), SETTINGS)]

    assert "usage out is 18, by the results 22" in lines
    assert "usage in is 12, by the results 16" in lines


def test_counts_of_an_unknown_tenant_and_missing_ones_are_faults() -> None:
    other = Account(Counter({"requests": 1}), {}, 0.0, 0, 0)

    assert found(lambda all_: all_.tenants.update(other=other)) == [
        "usage requests is 1, by the results 0"
    ]
    assert "usage in is 0, by the results 12" in found(lambda all_: all_.tenants.clear())


@pytest.mark.parametrize(
    "event",
    [
        Moved(99.6, C, "1-1", "intake:high:other", ACME),
        Moved(99.6, C, "1-1", "lane:w.1", "other"),
        Moved(99.6, C, "1-7", "intake:high:acme", ""),
        Charged(C, "1-1", "other"),
    ],
)
def test_a_request_under_another_tenant_is_a_fault(event: Event) -> None:
    def kinds(events: list[Event]) -> set[str]:
        history = gather(events)
        return {one.kind for one in check(history, lambda _: Answer(None, None))}

    assert "tenant" not in kinds([*load(), Charged(C, "1-1", ACME), Charged(C, "1-7", "")])
    assert "tenant" in kinds([*load(), event])


def test_tenants_have_different_weights_and_some_have_limits() -> None:
    settings = tenants_of_a_run(3).values()

    assert [one.weight for one in settings] == [1, 2, 4]
    assert [one.tokens_per_day > 0 for one in settings] == [False, False, True]
