"""Keys on the board: listed, created and shown once, revoked."""

from __future__ import annotations

import re
from typing import Any

from tests.board.asking import Asking
from tests.board.keyed import Keyed
from tests.support.api_keys import create_key
from tokenyard.ops.audit import read_audit
from tokenyard.ops.keys import list_keys
from tokenyard.protocol.keys import Yard

HOSTILE = "<b>x</b>\x1b[31m\u202e"


def create(ask: Asking, **fields: str) -> Any:
    form = {"back": "/board/keys", "why": "for the demo", **fields}
    return ask("/board/do/key.create", "POST", form=form)


def test_without_keys_it_says_so(ask: Asking) -> None:
    assert "There is no key." in ask("/board/keys").body


def test_keys_are_listed_without_what_opens_anything(bare: Yard, ask: Asking) -> None:
    secret, key_id = create_key(bare, "ann", name=HOSTILE, models=[HOSTILE], classes=["low"])
    create_key(bare, role="operator", name="of bob")
    page = ask("/board/keys").body
    assert "2 keys" in page
    assert key_id in page
    assert secret not in page
    assert "<b>x" not in page
    assert "\u202e" not in page
    assert '<span class="badge">operator</span>' in page
    of_ann = ask("/board/keys?tenant=ann").body
    assert "1 key," in of_ann
    assert "of bob" not in of_ann


def test_names_of_a_million_characters_are_cut(bare: Yard, ask: Asking) -> None:
    create_key(bare, "ann", name="n" * 1_000_000, models=["m" * 1_000_000])
    for path in ("/board/keys", "/board/tenants/ann"):
        assert len(ask(path).body) < 20_000
    [key_id] = list_keys(bare)
    assert len(ask(f"/board/do/key.revoke?key={key_id}").body) < 20_000


def test_many_keys_are_paged(bare: Yard, ask: Asking) -> None:
    for number in range(120):
        create_key(bare, "ann", name=f"number-{number:03}")
    page = ask("/board/keys").body
    assert "Page 1 of 2" in page
    assert page.count('name="key"') == 100
    for number in (2, 3):  # of a list that has become shorter, the last page
        assert ask(f"/board/keys?page={number}").body.count('name="key"') == 20
    assert ask("/board/keys?page=0").status == 400


def test_a_new_key_is_shown_once(bare: Yard, ask: Asking) -> None:
    # If a key is created,
    answer = create(
        ask, tenant="ann", role="viewer", name="demo", models="a, b", classes="low,normal"
    )
    # I expect it on this page,
    assert answer.status == 200
    [secret] = re.findall(r"ty-[\w-]{43}", answer.body)
    [(key_id, key)] = list_keys(bare).items()
    assert (key.tenant, key.role, key.name) == ("ann", "viewer", "demo")
    assert (key.models, key.classes) == (["a", "b"], ["low", "normal"])
    assert answer.headers["cache-control"] == "no-store"
    # and nowhere else: not in the keys, not in the audit.
    [entry] = read_audit(bare)
    assert key_id in entry.target
    assert entry.why == "for the demo"
    assert secret not in repr(entry)
    for stored in bare.connection.scan_iter(f"tokenyard:{{{bare.keys.yard}}}:*"):
        assert secret.encode() not in (bare.connection.dump(stored) or b"")


def test_selected_keys_are_revoked(bare: Yard, ask: Asking) -> None:
    ids = [create_key(bare, "ann", name=HOSTILE)[1] for _ in range(3)]
    asked = ask(f"/board/do/key.revoke?key={ids[0]}&key={ids[1]}&key=nothing").body
    assert "Revoke 2 keys." in asked
    assert "<b>x" not in asked
    assert len(list_keys(bare)) == 3
    form = {"key": [ids[0], ids[1], "nothing"], "back": "/board/keys"}
    done = ask("/board/do/key.revoke", "POST", form=form)
    assert done.status == 303
    assert "2 keys revoked;" in ask(done.location).body
    assert list(list_keys(bare)) == [ids[2]]
    assert ids[0] in read_audit(bare)[0].target
    # Again there is nothing to do.
    assert "no such key" in ask(f"/board/do/key.revoke?key={ids[0]}").body
    assert ask("/board/do/key.revoke", "POST", form=form).status == 400
    assert ask("/board/do/key.revoke", "POST", form={"key": ""}).status == 400


def test_ones_own_key_ends_ones_session(door: Keyed) -> None:
    bearer = {"authorization": f"Bearer {door.secrets['admin']}"}
    asked = door.ask(f"/board/do/key.revoke?key={door.ids['admin']}", **bearer).body
    assert "You are logged in with one of them" in asked
