"""configure.lua: settings of tenants change together, and are announced."""

from __future__ import annotations

from tests.support.yard import PlayedYard


def stored(yard: PlayedYard) -> dict[bytes, bytes]:
    return dict(yard.connection.hgetall(yard.keys.tenants))


def test_several_tenants_change_at_once(yard: PlayedYard) -> None:
    # Given two tenants
    assert yard.scripts.configure([("ann", b"", b'{"weight":2}'), ("bob", b"", b"{}")])
    assert stored(yard) == {b"ann": b'{"weight":2}', b"bob": b"{}"}

    # If one is changed, one removed and one added,
    changes = [("ann", b'{"weight":2}', b"{}"), ("bob", b"{}", b""), ("cem", b"", b"{}")]
    assert yard.scripts.configure(changes)

    # I expect all of it, and one event for the coordinator.
    assert stored(yard) == {b"ann": b"{}", b"cem": b"{}"}
    assert yard.events() == [{b"event": b"tenants"}] * 2


def test_outdated_settings_of_one_tenant_keep_all_from_changing(yard: PlayedYard) -> None:
    assert yard.scripts.configure([("ann", b"", b"{}")])
    for seen in (b"", b'{"weight":2}'):
        assert not yard.scripts.configure([("bob", b"", b"{}"), ("ann", seen, b"")])
    assert stored(yard) == {b"ann": b"{}"}
    assert len(yard.events()) == 1


def test_a_repeated_call_changes_nothing(yard: PlayedYard) -> None:
    change = ("ann", b"", b'{"weight":2}')
    assert yard.scripts.configure([change])
    assert not yard.scripts.configure([change])
    assert len(yard.events()) == 1
