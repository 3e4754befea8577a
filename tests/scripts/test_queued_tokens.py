"""All that becomes a prompt counts while a request waits, and leaves with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.scripts.quota_rig import ACCEPTED, QUOTA, codes, limit
from tests.scripts.tenant_rig import counts
from tests.support.builders import make_request
from tests.support.yard import PlayedYard, QueuedRequest
from tokenyard.protocol.errors import Code
from tokenyard.protocol.wire import ChatOptions, Request, chat_fields, prompt_value, request_fields
from tokenyard.scripts.answers import Transfer, Transferred

MESSAGES = [{"role": "user", "content": "hello"}]
CHATS = {
    "tools": ChatOptions(tools=[{"name": "t" * 4_000}]),
    "documents": ChatOptions(documents=[{"text": "d" * 4_000}]),
    "chat_template_kwargs": ChatOptions(chat_template_kwargs={"x": "k" * 4_000}),
    "all": ChatOptions(
        tools=[{"name": "t\u0001é" * 900}],
        documents=[{"text": 'd"\\' * 900}],
        chat_template_kwargs={"x": "k" * 4_000},
    ),
}


def chat(options: ChatOptions, tenant: str = "acme") -> Request:
    return make_request(messages=MESSAGES, chat=options, tenant=tenant, metadata={"m": "x" * 999})


def tokens_of(request: Request) -> int:
    """By the fields of its entry."""
    more = [value for value in chat_fields(request.chat).values() if isinstance(value, bytes)]
    return (len(prompt_value(request)) + sum(map(len, more))) // 4


def is_empty(yard: PlayedYard) -> bool:
    return yard.queued_tokens() == 0 and "waiting_tokens" not in counts(yard)


def leave(yard: PlayedYard, waiting: QueuedRequest, how: str, worker: str) -> None:
    """The request stops waiting, in one of the ways in which it can."""
    if how == "dispatch":
        yard.place(waiting, worker)
    elif how == "cancel":
        yard.scripts.cancel("anon", waiting.request.id, "x")
    else:
        yard.answer(waiting, Code.INVALID_REQUEST)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("how", ["dispatch", "cancel", "answer"])
def test_what_a_template_is_given_counts_until_it_leaves(
    yard: PlayedYard, worker: str, name: str, how: str
) -> None:
    request = chat(CHATS[name])
    others = [yard.submit(chat(ChatOptions())) for _ in range(2)]
    few = yard.queued_tokens()
    waiting = yard.submit(request)
    assert yard.queued_tokens() - few == tokens_of(request) > 1_000
    assert counts(yard)["waiting_tokens"] == yard.queued_tokens()
    leave(yard, waiting, how, worker)
    assert yard.queued_tokens() == counts(yard)["waiting_tokens"] == few
    for other in others:
        yard.scripts.cancel("anon", other.request.id, "x")
    assert is_empty(yard)


def test_the_leaders_scan_counts_the_same(yard: PlayedYard) -> None:
    for options in CHATS.values():
        yard.submit(chat(options))
        yard.submit(chat(options, tenant=""))
    look = yard.scripts.astray(0, 1_000_000)
    assert look.tokens == look.queued_tokens == yard.queued_tokens()


def test_a_limit_of_tokens_counts_them(yard: PlayedYard) -> None:
    request = chat(CHATS["tools"])
    limit(yard, max_waiting_tokens=tokens_of(request) - 1)
    assert codes(yard.scripts.submit("normal", [request])) == [QUOTA]
    limit(yard, max_waiting_tokens=tokens_of(request))
    assert codes(yard.scripts.submit("normal", [request])) == [ACCEPTED]
    limit(yard, tokens_per_minute=tokens_of(request))
    assert codes(yard.scripts.submit("normal", [chat(CHATS["tools"])])) == [QUOTA]


def entries() -> dict[str, dict[Any, Any]]:
    """One chat, and one text, as they may stand in an entry by a plain XADD."""
    plain = request_fields(chat(CHATS["all"]))
    texts = {
        name: value.decode() if isinstance(value, bytes) else str(value)
        for name, value in plain.items()
    }
    inside = {name: text for name, text in texts.items() if name not in {"id", "messages"}}
    hidden = msgspec.json.encode(inside).replace(b'"tools"', b'"\\u0074ools"')
    of_text = msgspec.json.encode({"prompt": "x" * 4_000, "tenant": "acme"})
    return {
        "fields": plain,
        "fields first": dict(reversed(plain.items())),
        "common": {"id": 1, "messages": plain["messages"], "common": msgspec.json.encode(inside)},
        "escaped": {"id": 1, "messages": plain["messages"], "common": hidden},
        "all in common": {"id": 1, "common": msgspec.json.encode(texts)},
        "own first": {
            **plain,
            "common": msgspec.json.encode({"tools": "x" * 99_999, "tenant": "acme"}),
        },
        "text in common": {"id": 1, "common": of_text},
    }


@pytest.mark.parametrize("form", entries())
@pytest.mark.parametrize("how", ["dispatch", "cancel", "answer"])
def test_a_plain_entry_counts_in_every_form(
    yard: PlayedYard, worker: str, form: str, how: str
) -> None:
    limit(yard, tokens_per_minute=100_000)
    request = chat(CHATS["all"])
    pushed = yard.push({**entries()[form], "id": request.id}, request)
    answers = yard.scripts.transfer(
        yard.token, "normal", [Transfer(pushed.entry, "acme", "anon", request.id, "d")]
    )
    assert [one.code for one in answers] == [Transferred.MOVED]
    expected = 1_000 if form == "text in common" else tokens_of(request)
    assert yard.queued_tokens() == counts(yard)["waiting_tokens"] == expected
    [(entry, _)] = yard.intake("normal:acme")
    waiting = QueuedRequest(request, "normal:acme", entry)
    leave(yard, waiting, how, worker)
    assert is_empty(yard)


@pytest.mark.parametrize(
    "common", ["", "[", "[1]", '{"tools":[1]}', '{"tools":{"a":1}}', '"tools"']
)
def test_common_fields_that_cannot_be_read_count_nothing(yard: PlayedYard, common: str) -> None:
    messages = msgspec.json.encode(MESSAGES)
    pushed = yard.push({"id": "q", "messages": messages, "common": common, "tenant": "acme"})
    limit(yard, tokens_per_minute=100_000)
    yard.scripts.transfer(yard.token, "normal", [Transfer(pushed.entry, "acme", "anon", "q", "d")])
    assert counts(yard)["waiting_tokens"] == len(messages) // 4
