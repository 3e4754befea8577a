"""Markup, control characters and right-to-left marks in every field are shown as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.serving import serve
from tests.cli.test_hostile_text import moves
from tests.support.api_keys import create_key
from tests.support.builders import entry_fields, make_request, make_worker_info
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.board.pages import PAGES
from tokenyard.ops.audit import AuditEntry, record
from tokenyard.protocol.replies import ErrorInfo, Reply, encode_reply, json_text
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, encode_host, encode_worker
from tokenyard.protocol.yard import Yard

pytestmark = pytest.mark.long

#: It ends tags and attributes, runs scripts, turns the text around, and moves the cursor.
EVIL = (
    "\"'><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</title></section><mark>bold\u202edlrow\u2066\x1b[31m\x00\x9b2J\u2028&lt;{{ 7*7 }}{% x %}"
)
LONG = 1_000_000
#: No page is larger than this, whatever is on the yard.
MOST_BYTES = 300_000
ID = f"evil{EVIL}"
MENU = [page.path for page in PAGES if page.menu]


@pytest.fixture(scope="module")
def evil(shared_server: Any) -> Iterator[tuple[Plant, str]]:
    """A yard in which every text of a client is hostile, and a board that shows all of it."""
    server: Server = shared_server("valkey")
    with Plant(server.url) as plant:
        plant.coordinator()
        plant.wait_for_leader()
        _write(plant)
        yield plant, serve(plant, content="viewer")


def _write(plant: Plant) -> None:
    run: Any = plant.connection
    keys = plant.keys
    error = json_text(ErrorInfo("POISONED" + EVIL, "it said " + EVIL + "x" * LONG))
    result = Reply(id=ID, event="result", seq=0, tokens=b"", status="failed", error=error)
    told = {"text": EVIL, "worker": "w.1", "attempt": "1", "t1": f"1-0 w.1 because {EVIL}"}
    ledger = {"state": "failed", "sid": "normal/1-0", "ended": "1", "reason": EVIL, **told}
    run.hset(keys.ledger("evil", ID), mapping={**ledger, "result": encode_reply(result)})
    waits = make_request("waits" + EVIL, client="evil", prompt=EVIL + "x" * LONG, model="m" + EVIL)
    run.xadd(keys.intake("low"), {**entry_fields(waits), b"session": EVIL.encode()})
    letter = {**entry_fields(waits), b"dead_reason": EVIL.encode(), b"dead_sid": b"normal/1-0"}
    run.xadd(keys.dead, {**letter, EVIL.encode(): EVIL.encode()})
    run.xadd(keys.dead, {EVIL: EVIL, "id": "x" * LONG, "dead_reason": EVIL, "dead_sid": EVIL})
    run.hset(keys.tenants, mapping={"evil": encode_tenant(TenantSettings(models=[EVIL]))})
    run.zadd(keys.service, {"evil": 1, "y" + EVIL: 2})
    models = [ModelInfo(name="large" + EVIL, fault="no " + EVIL)]
    run.hset(keys.hosts, "host", encode_host(HostInfo(name="host", host=EVIL, models=models)))
    info = make_worker_info("w", model="m" + EVIL, engine=EVIL, host=EVIL)
    plant.scripts.register("w", 600_000, encode_worker(info))
    create_key(Yard(run, keys), "evil", name=EVIL, models=[EVIL], role="viewer")
    entry = AuditEntry(who=EVIL, role=EVIL, action=EVIL, target=EVIL, why=EVIL, text=EVIL)
    record(Yard(run, keys), entry)
    desired = {"run_state": "PAUSED", "why": EVIL, "by": EVIL}
    run.hset(keys.desired, "worker:w", json.dumps(desired))
    eventually(lambda: run.xlen(keys.dead) >= 2)


def _paths(plant: Plant) -> list[str]:
    """Every page, with hostile parameters where it takes some."""
    letters = [entry.decode() for entry, _ in plant.connection.xrange(plant.keys.dead)]
    return [
        *MENU,
        *(f"/dead/{letter}" for letter in letters),
        f"/request?client=evil&id={quote(ID)}",
        f"/request?client=evil&id={quote('waits' + EVIL)}",
        f"/model?name={quote('m' + EVIL)}",
        "/tenants/evil",
        "/devices/w",
        f"/requests?state=failed&error={quote(EVIL)}",
        f"/requests?client={quote(EVIL)}",
        f"/dead?text={quote(EVIL)}",
        f"/tenants?q={quote(EVIL)}",
        f"/devices/{quote(EVIL, safe='')}",
        f"/batches/{quote(EVIL, safe='')}",
        f"/{quote(EVIL, safe='')}",
    ]


def test_every_text_of_a_client_is_shown_as_text(
    new_window: NewWindow, evil: tuple[Plant, str]
) -> None:
    plant, url = evil
    window = new_window(url, width=360)
    shown = 0
    for path in _paths(plant):
        answer = window.open(path)
        body = answer.text()
        assert len(body) < MOST_BYTES, path
        assert window.page.title() != "owned", path
        assert window.page.locator("main mark, main img, main script").count() == 0, path
        assert moves(window.page.locator("body").inner_text()) == [], path
        assert answer.status in {200, 400, 404}, path
        assert window.sticks_out() == [], path
        shown += "<script>" in window.text()
    assert shown >= 8  # as text, on most pages


def test_updates_show_it_as_text_too(new_window: NewWindow, evil: tuple[Plant, str]) -> None:
    plant, url = evil
    window = new_window(url)
    window.open("/requests")
    more = make_request("more" + EVIL, client="evil", prompt=EVIL, model="m" + EVIL)
    plant.connection.xadd(plant.keys.intake("low"), entry_fields(more))

    window.wait_for_text("more\"'><script>")

    assert window.page.locator("main mark, main img, main script").count() == 0
