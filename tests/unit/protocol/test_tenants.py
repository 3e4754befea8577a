"""Settings of tenants: what Redis keeps, and what of it can be read."""

from __future__ import annotations

import msgspec
import pytest

from tokenyard.protocol.tenants import (
    DEFAULTS,
    TenantSettings,
    decode_each,
    decode_tenant,
    decode_tenants,
    encode_tenant,
    is_tenant,
)


def test_only_what_differs_from_the_defaults_is_kept() -> None:
    assert encode_tenant(DEFAULTS) == b"{}"
    heavy = TenantSettings(weight=4, models=["m"], classes=["low"], tokens_per_day=1_000)
    assert decode_tenant(encode_tenant(heavy)) == heavy


def test_a_field_of_a_later_release_is_left_out() -> None:
    assert decode_tenant(b'{"weight":2,"later":1}') == TenantSettings(weight=2)


@pytest.mark.parametrize(
    "packed",
    [
        b'{"weight":0}',
        b'{"weight":-1}',
        b'{"weight":1e9}',
        b'{"weight":1e999}',
        b'{"weight":NaN}',
        b'{"weight":true}',
        b'{"tokens_per_minute":-1}',
        b'{"tokens_per_minute":1e16}',
        b'{"models":[]}',
        b'{"classes":["urgent"]}',
        b"[]",
        b"\xff",
        b"",
    ],
)
def test_invalid_settings_are_refused(packed: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_tenant(packed)
    assert decode_each({b"ann": packed}) == {"ann": None}
    assert decode_tenants({b"ann": packed}) == {"ann": DEFAULTS}


def test_fields_that_name_no_tenant_are_left_out() -> None:
    stored = {b"zoe": b"{}", b"\xff": b"{}", b"": b"{}", b"a b": b"{}", b"ann": b'{"weight":2}'}
    assert list(decode_tenants(stored).items()) == [
        ("ann", TenantSettings(weight=2)),
        ("zoe", DEFAULTS),
    ]


def test_a_tenant_has_a_name_that_can_be_part_of_a_key() -> None:
    assert is_tenant("team-1:eu@prod")
    assert is_tenant("a" * 90)
    assert not any(map(is_tenant, ("", "a" * 91, "a b", "a/b", "{a}", "a\n", "é")))
