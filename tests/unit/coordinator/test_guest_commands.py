"""The inbox of a guest is hostile: parsing an entry never raises."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.guests.commands import (
    CancelCommand,
    LeaseRenewal,
    Submission,
    Unreadable,
    parse_guest_command,
)
from tests.support.builders import entry_fields
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.wire import (
    COMMON_FIELDS,
    Request,
    SamplingParams,
    template_of,
)
from tokenyard.scripts import submit

MOST_TTL_S = 3600
names = st.sampled_from(
    [
        *(name.encode() for name in sorted(COMMON_FIELDS)),
        *(b"id", b"prompt", b"tokens", b"messages", b"common", b"do", b"class", b"receipt"),
        *(b"ended", b"leave", b"attach", b"refuse_late", b"attempt"),
    ]
)
values = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"1", b"0", b"-1", b"{}", b"[]", b"[[", b"ann", b"ann-1", b"bob", b"submit"]),
    st.sampled_from([b"cancel", b"attend", b"normal", b"replies:ann", b'{"client":"bob"}', b"x"]),
)


def ask(tenant_of_guest: str = "", **fields: str | bytes) -> object:
    raw = {
        name.encode(): value.encode() if isinstance(value, str) else value
        for name, value in fields.items()
    }
    return parse_guest_command("ann", raw, MOST_TTL_S, tenant_of_guest)


@given(
    st.dictionaries(names | st.binary(max_size=8), values, max_size=12),
    st.sampled_from(["", "ann"]),
)
def test_no_entry_raises_or_names_another_client(fields: dict[bytes, bytes], tenant: str) -> None:
    read = parse_guest_command("ann", fields, MOST_TTL_S, tenant)
    match read:
        case Submission():
            assert read.request.client == read.address.client == read.template.client
            assert read.request.tenant == tenant
            assert read.request.client == "ann" or read.request.client.startswith("ann-")
            assert read.watched in {"", read.request.client}
            assert 60 <= read.request.result_ttl_s <= MOST_TTL_S
            assert read.request.priority >= 0
            # The intake gets the request that was parsed.
            call = submit(Keys("main"), "normal", [read.request], templates=[read.template])
            assert call.keys[-1].startswith("tokenyard:{main}:request:ann")
            shared = msgspec.json.decode(read.template.common, type=dict[str, str])
            assert shared.keys() <= COMMON_FIELDS
            assert shared.get("tenant", "") == tenant
        case CancelCommand() | LeaseRenewal():
            assert read.client == "ann" or read.client.startswith("ann-")
        case Unreadable(address=address):
            assert address is None or address.client.startswith("ann")


def test_fields_of_a_submission_are_kept_as_they_were_given() -> None:
    # Given a request with an explicit default, which the model's own default must not replace
    params = SamplingParams(temperature=1.0, max_tokens=7)
    said = Request(id="q", client="ann", prompt="x", params=params, stated=("temperature",))
    read = parse_guest_command("ann", entry_fields(said), MOST_TTL_S)
    shared = msgspec.json.decode(read.template.common, type=dict[str, str])
    assert msgspec.json.decode(shared["params"]) == {"temperature": 1.0, "max_tokens": 7}
    # and the same by way of a template, as Tokenyard's clients write it
    template = template_of(said)
    again = {b"id": b"q", b"prompt": b"x", b"common": template.common.encode()}
    other = parse_guest_command("ann", again, MOST_TTL_S)
    assert other.digest == read.digest
    entry = {b"id": b"q", b"prompt": b"x", b"common": read.template.common.encode()}
    assert isinstance(parse_request(entry), Request)


@pytest.mark.parametrize("tenant", ["", "ann"])
@pytest.mark.parametrize(
    "named", [{}, {"tenant": "bob"}, {"common": '{"tenant":"bob"}'}, {"tenant": b"\xff"}]
)
def test_a_guest_submits_for_its_own_tenant(tenant: str, named: dict[str, str | bytes]) -> None:
    read = ask(tenant, id="q", prompt="x", **named)
    assert isinstance(read, Submission)
    assert read.request.tenant == tenant
    assert msgspec.json.decode(read.template.common).get("tenant", "") == tenant
    # A repeated entry is the same request, whatever the operator has registered since.
    assert read.digest == ask(id="q", prompt="x").digest


@pytest.mark.parametrize(
    ("given_s", "kept_s"), [("1", 60), ("60", 60), ("600", 600), ("2592000", 3600), ("", 3600)]
)
def test_the_time_to_live_is_bounded(given_s: str, kept_s: int) -> None:
    more = {"result_ttl": given_s} if given_s else {}
    read = ask(id="q", prompt="x", **more)
    assert read.request.result_ttl_s == kept_s


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "q", "prompt": "x", "client": "bob"},
        {"id": "q", "prompt": "x", "client": "anna"},
        {"id": "q", "prompt": "x", "common": '{"client":"bob"}'},
        {"id": "q", "prompt": "x", "reply_to": "replies:bob"},
        {"id": "q", "prompt": "x", "class": "high"},
        {"id": "q", "prompt": "x", "class": "retry"},
        {"id": "q", "prompt": "x", "priority": "-1"},
        {"id": "q"},
        {"prompt": "x"},
        {"do": "cancel"},
        {"do": "cancel", "id": "x" * 201},
        {"do": "attend", "ended": "no JSON"},
        {"do": "attend", "ended": msgspec.json.encode(["x"] * 501)},
        {"do": "empty"},
    ],
)
def test_a_bad_command_is_refused(fields: dict[str, str | bytes]) -> None:
    assert isinstance(ask(**fields), Unreadable)
