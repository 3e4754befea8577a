"""tokenyard.protocol.parse: what many requests have in common, in the field `common`."""

from __future__ import annotations

import pytest

from tokenyard.protocol.errors import Code
from tokenyard.protocol.parse import parse_request, unfold
from tokenyard.protocol.wire import Request, Unanswerable, pack_tokens

COMMON = b'{"v":"1","client":"ann","reply_to":"replies:ann","params":"{\\"max_tokens\\":3}"}'
FOLDED = {b"id": b"q1", b"tokens": pack_tokens([1, 2]), b"common": COMMON}


@pytest.mark.parametrize("prompt", [{b"tokens": pack_tokens([1, 2])}, {b"prompt": b"x"}])
def test_common_fields_may_be_in_the_field_common(prompt: dict[bytes, bytes]) -> None:
    fields = {b"id": b"q1", **prompt}
    plain = {b"v": b"1", b"client": b"ann", b"reply_to": b"replies:ann"}
    plain[b"params"] = b'{"max_tokens":3}'

    assert parse_request(fields | {b"common": COMMON}) == parse_request(fields | plain)


@pytest.mark.parametrize("prompt", [{b"tokens": pack_tokens([1, 2])}, {b"prompt": b"x"}])
def test_common_is_parsed_once(prompt: dict[bytes, bytes]) -> None:
    found = [parse_request({b"id": name, **prompt, b"common": COMMON}) for name in (b"a", b"b")]

    first, second = (one for one in found if isinstance(one, Request))
    assert first.params is second.params


@pytest.mark.parametrize(
    ("own", "defaults", "expected"),
    [
        ({b"params": b'{"max_tokens":4}'}, None, (4, 1.0)),
        ({}, {"temperature": 0.5, "max_tokens": 9}, (3, 0.5)),
    ],
    ids=["the entry's own word comes first", "the model's default last"],
)
def test_parameters_beside_common(
    own: dict[bytes, bytes], defaults: dict[str, float] | None, expected: tuple[int, float]
) -> None:
    found = parse_request(FOLDED | own, defaults)

    assert found.client == "ann"
    assert (found.params.max_tokens, found.params.temperature) == expected


@pytest.mark.parametrize(
    "spoofed",
    [
        b'{"sid":"high/1-1","attempt":"7","published":"abcd","model":"m"}',
        b'{"common":"{\\"tenant\\":\\"t\\"}","model":"m"}',
    ],
    ids=["fields of the system", "another common"],
)
def test_common_may_hold_no_other_fields_than_a_clients(spoofed: bytes) -> None:
    found = unfold({b"id": b"q1", b"common": spoofed, b"attempt": b"1"})

    assert found == {b"id": b"q1", b"model": b"m", b"attempt": b"1"}


@pytest.mark.parametrize(
    "fields",
    [
        *({b"common": common} for common in (b"", b"{", b"[]", b"null", b'{"n":1}', b"\xff")),
        {b"common": b'{"client":"no spaces"}'},
        {b"common": b'{"client":""}'},
        {b"common": b"{", b"client": b"ann", b"id": b""},
        {b"common": b"{", b"client": b"no spaces"},
    ],
)
def test_an_entry_with_unreadable_common_is_unanswerable(fields: dict[bytes, bytes]) -> None:
    """The client may stand there, so that there is nobody to answer."""
    assert isinstance(parse_request(FOLDED | fields), Unanswerable)


@pytest.mark.parametrize("reply_to", ["", "replies:ann", "replies:bob"])
def test_a_client_field_beside_an_unreadable_common_gets_a_refusal(
    reply_to: str,
) -> None:
    own = {b"id": b"q1", b"client": b"ann", b"reply_to": reply_to.encode()}

    found = parse_request({**own, b"prompt": b"x", b"common": b"{"})

    assert (found.id, found.client, found.code) == ("q1", "ann", Code.INVALID_REQUEST)
    assert found.reply_to == (reply_to if reply_to == "replies:ann" else "")
    assert found.message.startswith("common: ")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({b"tokens": b""}, "tokens"),
        ({b"tokens": b"abc"}, "tokens"),
        ({b"tokens": pack_tokens([-1])}, "tokens"),
        ({b"prompt": b"x"}, "prompt"),
        ({b"tokens": b"", b"prompt": b"x"}, "prompt"),
        ({b"tokens": None, b"prompt": b""}, "prompt"),
        ({b"tokens": None, b"prompt": b"\xff"}, "prompt"),
        ({b"common": b'{"prompt":"x"}'}, "prompt"),
        ({b"common": b'{"params":"{\\"top_p\\":2}"}'}, "params.top_p"),
    ],
)
def test_an_error_in_common_is_reported_like_one_in_an_own_field(
    fields: dict[bytes, bytes | None], field: str
) -> None:
    given_as = FOLDED | fields
    found = parse_request({name: value for name, value in given_as.items() if value is not None})

    assert found.message.startswith(field)
