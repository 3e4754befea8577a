"""Tenants on the board: who waits, one with its usage, setting and removing."""

from __future__ import annotations

import datetime
import re
from typing import Any
from urllib.parse import quote

import pytest

from tests.board.asking import Asking
from tests.support.api_keys import create_key
from tokenyard.ops.audit import read_audit
from tokenyard.ops.tenants import set_tenant
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.yard.tenants import read_tenants

DASH = "\N{EN DASH}"
HOSTILE = "<b>x</b>\x1b[31m\u202e"


def wait(bare: Yard, tenant: str, waiting: int, service: float, **counts: int) -> None:
    """A tenant in line, as the scripts leave it."""
    fields: Any = {"waiting": waiting, "waiting_tokens": 10 * waiting, "running": 2, **counts}
    pipeline = bare.connection.pipeline(transaction=False)
    pipeline.hset(bare.keys.tenant(tenant), mapping=fields)
    pipeline.zadd(bare.keys.service, {tenant: service})
    pipeline.zadd(bare.keys.line, {tenant: service})
    pipeline.execute()


def cells(page: str, name: str) -> list[str]:
    """The texts of a row, by what its heading has."""
    row = next(row for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if name in row)
    texts = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
    return [" ".join(re.sub("<[^>]+>", " ", text).split()) for text in texts]


# The list


def test_an_empty_yard_says_so(ask: Asking) -> None:
    answer = ask("/board/tenants")
    assert answer.status == 200
    assert "There is no tenant yet" in answer.body
    assert "No tenant waits." in ask("/board/tenants?show=waiting").body


def test_who_waits_stands_first_with_shares_and_limits(bare: Yard, ask: Asking) -> None:
    # Given two tenants in line, one of them with limits, and one that was only set
    limits = TenantSettings(weight=3, max_waiting_requests=20, tokens_per_day=1_000)
    bare.connection.hset(bare.keys.tenants, "bob", encode_tenant(limits))
    bare.connection.hset(bare.keys.tenants, "idle", encode_tenant(TenantSettings(max_tokens=7)))
    wait(bare, "ann", 5, 10.0)
    wait(bare, "bob", 7, 5.0, **{"refused:tokens_per_day": 4})
    page = ask("/board/tenants").body
    # I expect the one that is next first, with what each should have,
    assert page.index(">bob</a>") < page.index(">ann</a>")
    assert cells(page, ">ann</a>")[1:7] == ["5", "50", "2", "1", "25.0 %", DASH]
    assert cells(page, ">bob</a>")[1:7] == ["7", "70", "2", "3", "75.0 %", DASH]
    # how far its limits are used and what they refused,
    assert cells(page, ">bob</a>")[7] == "4"
    assert cells(page, ">bob</a>")[8] == "35 % max_waiting_requests 0 % tokens_per_day"
    assert 'aria-label="7 of 20"' in page
    # who is next and why,
    assert "bob is served next: of 2 tenants in line it has had least for its weight." in page
    # and the third among all.
    assert ">idle</a>" not in page
    assert ">idle</a>" in ask("/board/tenants?show=all").body


def test_who_may_run_no_more_is_passed_over(bare: Yard, ask: Asking) -> None:
    limit = TenantSettings(max_running_requests=2)
    bare.connection.hset(bare.keys.tenants, "ann", encode_tenant(limit))
    wait(bare, "ann", 5, 1.0)
    wait(bare, "bob", 7, 5.0)
    page = ask("/board/tenants").body
    assert "bob is served next" in page
    assert "but for those at max_running_requests: ann" in page
    assert "2 of its requests run, and max_running_requests is 2" in ask("/board/tenants/ann").body


def test_had_is_what_they_were_given_since_somebody_looked(bare: Yard, ask: Asking) -> None:
    wait(bare, "ann", 5, 10.0)
    wait(bare, "bob", 7, 10.0)
    ask("/board/tenants")
    wait(bare, "ann", 5, 20.0)
    wait(bare, "bob", 7, 40.0)
    page = ask("/board/tenants?again=1").body
    assert (cells(page, ">ann</a>")[6], cells(page, ">bob</a>")[6]) == ("25.0 %", "75.0 %")


@pytest.mark.long
def test_ten_thousand_tenants_are_paged_and_found(bare: Yard, ask: Asking) -> None:
    # Given 10,000 tenants that were served, each with settings, and 1,500 in line
    packed = encode_tenant(TenantSettings(tokens_per_minute=100))
    names = [f"tenant-{number:05}" for number in range(10_000)]
    bare.connection.hset(bare.keys.tenants, mapping=dict.fromkeys(names, packed))  # type: ignore[arg-type]
    bare.connection.zadd(bare.keys.service, {name: at for at, name in enumerate(names)})
    bare.connection.zadd(bare.keys.line, {name: at for at, name in enumerate(names[:1_500])})
    # I expect pages of 50 each, in line
    page = ask("/board/tenants").body
    assert "More than 1,000 tenants wait" in page
    assert page.count("<tr>") == 51
    assert ">tenant-00049</a>" in page
    assert ">tenant-00050</a>" in ask("/board/tenants?show=waiting&page=2").body
    # and among all, who has had most first,
    page = ask("/board/tenants?show=all").body
    assert "Page 1 of 200" in page
    assert ">tenant-09999</a>" in page
    for number in (200, 201, 1_000_000):  # of a list that has become shorter, the last page
        last = ask(f"/board/tenants?show=all&page={number}").body
        assert last.count("<tr>") == 51
        assert ">tenant-00000</a>" in last
    assert ask("/board/tenants?show=waiting&page=999").body.count("<tr>") == 51
    # and each by a part of its name.
    found = ask("/board/tenants?q=NANT-0731").body
    assert re.findall(r">(tenant-\d+)</a>", found) == [f"tenant-0731{n}" for n in range(10)]
    some = ask("/board/tenants?q=tenant").body
    assert "There are more" in some
    assert "Page 1 of 4" in some, "as many as are shown"
    assert ask("/board/tenants?q=tenant&page=4").body.count("<tr>") == 51


@pytest.mark.parametrize("path", ["?show=all", "?show=all&page=60", "?q=tenant-00042", "/tenant-1"])
def test_a_page_reads_a_bounded_part_of_the_yard(bare: Yard, ask: Asking, path: str) -> None:
    # Given so many tenants that all of their settings take a megabyte
    names = [f"tenant-{number:05}" for number in range(5_000)]
    bare.connection.zadd(
        bare.keys.service, {name: at for at, name in enumerate(["tenant-1", *names])}
    )
    packed = encode_tenant(TenantSettings(models=["x" * 200]))
    bare.connection.hset(bare.keys.tenants, mapping=dict.fromkeys(names, packed))  # type: ignore[arg-type]
    before: Any = bare.connection.info("all")
    assert ask(f"/board/tenants{path}").status == 200
    after: Any = bare.connection.info("all")
    assert after["total_net_output_bytes"] - before["total_net_output_bytes"] < 250_000
    assert after["total_commands_processed"] - before["total_commands_processed"] < 250


@pytest.mark.parametrize("text", ["*", "?", "[a-z]", "\\", HOSTILE, "x" * 5_000, "^", "a" * 90])
def test_a_search_takes_any_text(ask: Asking, text: str) -> None:
    answer = ask(f"/board/tenants?q={quote(text)}")
    assert answer.status == 200
    assert "No tenant has such a name." in answer.body
    assert "<b>x" not in answer.body
    assert "\x1b" not in answer.body
    assert "\u202e" not in answer.body


# One tenant


def test_a_tenant_that_nobody_knows_is_not_found(ask: Asking) -> None:
    for name in ("nobody", "a%20b", "%3Cb%3E"):
        answer = ask(f"/board/tenants/{name}")
        assert answer.status == 404
        assert "<b>" not in answer.body


def test_one_tenant_shows_limits_usage_refusals_and_keys(bare: Yard, ask: Asking) -> None:
    settings = TenantSettings(weight=2, max_running_requests=4, models=["llama", HOSTILE])
    bare.connection.hset(bare.keys.tenants, "ann", encode_tenant(settings))
    wait(bare, "ann", 3, 1.0, **{"refused:models": 9, "refused_at:models": 1000})
    for number in range(3):
        bare.connection.xadd(bare.keys.intake("high:ann"), {"id": f"q{number}"})
    now = datetime.datetime.now(datetime.UTC)
    today = f"{now:%Y%m%d}"
    earlier = f"{now - datetime.timedelta(3):%Y%m%d}"
    used: Any = {
        f"{today} llama requests": 100,
        f"{today} llama in": 5_000,
        f"{today} llama out": 700,
        f"{today} llama failed": 3,
        f"{today} llama failed:WORKER_LOST": 2,
        f"{today} llama failed:POISONED": 1,
        f"{today} llama failed:<b>made up</b>": 1,
        f"{today} llama wait:8": 99,
        f"{today} llama wait:65536": 2,
        f"{today} {HOSTILE} in": 1,
        f"{earlier} llama in": 4,
    }
    bare.connection.hset(bare.keys.usage("ann"), mapping=used)
    key, key_id = create_key(bare, "ann", name=HOSTILE)
    create_key(bare, "bob", name="of bob")

    page = ask("/board/tenants/ann").body

    assert "3 high" in page
    assert "ann" in page
    assert cells(page, ">max_running_requests</th>")[1:] == ["4", "2, 50 %"]
    assert cells(page, ">models</th>")[1].startswith("llama+")
    assert cells(page, ">models</th>")[:2] != cells(page, ">9</td>")[:2]
    row = cells(page, "2 WORKER_LOST, 1 POISONED")
    assert row[2:] == [
        *("100", "5,000", "0", "700", "8 ms", "1 m", "3"),
        "2 WORKER_LOST, 1 POISONED",
        "0",
    ]
    assert "made up" not in page
    assert cells(page, ">All</th>")[2:4] == ["100", "5,005"]
    assert page.count('<rect class="tokens-') == 3
    assert key_id in page
    assert key not in page
    assert "of bob" not in page
    assert '/board/requests?tenant=ann"' in page
    for text in ("<b>x", "\x1b", "\u202e"):
        assert text not in page
    assert "5,001" in cells(ask("/board/tenants/ann?days=1").body, ">All</th>")


def test_settings_that_cannot_be_read_are_said(bare: Yard, ask: Asking) -> None:
    bare.connection.hset(bare.keys.tenants, "ann", b"\x1b{")
    assert "cannot be read" in ask("/board/tenants/ann").body
    assert "cannot be read" in ask("/board/tenants?show=all").body


def test_settings_of_a_million_characters_are_cut(bare: Yard, ask: Asking) -> None:
    packed = encode_tenant(TenantSettings(models=["m" * 1_000_000]))
    bare.connection.hset(bare.keys.tenants, "ann", packed)
    for path in (
        "tenants/ann",
        "tenants?show=all",
        "do/tenant.remove?tenant=ann",
        "do/tenant.set?tenant=ann",
    ):
        assert len(ask(f"/board/{path}").body) < 20_000
    # What no form can hold stays as it is.
    assert set_by_form(ask, tenant="ann", weight="2").status == 303
    [one] = read_tenants(bare, ["ann"])
    assert one.settings == TenantSettings(weight=2, models=["m" * 1_000_000])
    assert len(repr(read_audit(bare))) < 20_000


# Setting and removing


def set_by_form(ask: Asking, **fields: str) -> Any:
    form = {"back": "/board/tenants", "why": "asked by them", **fields}
    return ask("/board/do/tenant.set", "POST", form=form)


def test_a_tenant_is_set_as_on_the_command_line(bare: Yard, ask: Asking) -> None:
    # Given the form for a new tenant
    form = ask("/board/do/tenant.set").body
    assert "Use 1 to 90 of A-Z a-z 0-9" in form
    for name in TenantSettings.__struct_fields__:
        assert f'name="{name}"' in form
    # If it is filled in,
    done = set_by_form(
        ask,
        tenant="ann",
        weight="2.5",
        tokens_per_day="1,000,000",
        classes="low, normal",
        models="",
    )
    # I expect its settings, an event for the leader and an entry in the audit.
    assert done.status == 303
    assert done.location.startswith("/board/tenants?done=")
    [one] = read_tenants(bare, ["ann"])
    assert one.settings == TenantSettings(
        weight=2.5, tokens_per_day=1_000_000, classes=["low", "normal"]
    )
    assert [fields for _, fields in bare.connection.xrange(bare.keys.events)] == [
        {b"event": b"tenants"}
    ]
    [entry] = read_audit(bare)
    assert (entry.action, entry.target, entry.why) == ("tenant.set", "tenant ann", "asked by them")
    assert entry.text == "ann: new, weight 2.5, tokens_per_day 1,000,000, classes low+normal."
    assert "ann: new, weight 2.5" in ask(done.location).body


def test_what_somebody_else_has_changed_meanwhile_stays(bare: Yard, ask: Asking) -> None:
    set_tenant(bare, "ann", lambda _: TenantSettings(weight=2, max_tokens=7))
    form = ask("/board/do/tenant.set?tenant=ann").body
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))
    assert (fields["weight"], fields["max_tokens"]) == ("2", "7")
    set_tenant(bare, "ann", lambda _: TenantSettings(weight=9))
    answer = set_by_form(ask, **{**fields, "weight": "3"})
    assert answer.status == 400
    assert "somebody else has changed ann" in answer.body
    # The same with what stands there now is done.
    form = ask("/board/do/tenant.set?tenant=ann").body
    fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', form))
    assert set_by_form(ask, **{**fields, "weight": "3"}).status == 303
    [one] = read_tenants(bare, ["ann"])
    assert one.settings == TenantSettings(weight=3)


def test_removed_is_as_never_set(bare: Yard, ask: Asking) -> None:
    for name in ("ann", "bob", "cem"):
        set_tenant(bare, name, lambda _: TenantSettings(weight=2))
    asked = ask("/board/do/tenant.remove?tenant=ann&tenant=bob&tenant=nobody").body
    assert "for 2 tenants" in asked
    assert bare.connection.hlen(bare.keys.tenants) == 3
    form = {"tenant": ["ann", "bob"], "back": "/board/tenants"}
    assert ask("/board/do/tenant.remove", "POST", form=form).status == 303
    assert bare.connection.hkeys(bare.keys.tenants) == [b"cem"]
    assert read_audit(bare)[0].target == "tenant ann, tenant bob"
    assert ask("/board/do/tenant.remove", "POST", form=form).status == 400


@pytest.mark.parametrize(
    ("path", "block"), [("/board/tenants", "live_tenants"), ("/board/tenants/ann", "live_now")]
)
def test_an_open_page_gets_what_has_changed(bare: Yard, ask: Asking, path: str, block: str) -> None:
    wait(bare, "ann", 5_000, 10.0)
    page = ask(path).body
    live = ask(path, accept="text/event-stream", most_bytes=1).body
    event, _, html = live.partition("\n\n")[0].partition("\n")
    assert event == f"event: {block}"
    assert "5,000" in html
    assert f'<section id="{block}" data-live>' in page
    # The same as on the page, so that nothing jumps.
    told = "\n".join(line.removeprefix("data: ") for line in html.splitlines())
    assert " ".join(told.split()) in " ".join(page.split())
