"""The page of one request: its story, its tokens as they come, and what is hidden from whom."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any
from urllib.parse import quote

import pytest

from tests.board.looking import Looker, text_of, values_of
from tests.board.request_rig import ANSWER, PROMPT, SEES, asking, look, seen
from tests.board.test_requests import HOSTILE, fail
from tests.integration.test_listing import one_of_each_state
from tests.support.builders import make_delta, make_request, make_result
from tests.support.yard import PlayedYard
from tokenyard.board.pages import request as one
from tokenyard.board.pages.request import MOST_CHARACTERS, MOST_IDS, WIDTH, bar_of, content_of
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import ErrorInfo, Provenance, Reply, Usage, json_text
from tokenyard.protocol.wire import (
    PoolingParams,
    Request,
    SamplingParams,
    pack_tokens,
    request_fields,
)
from tokenyard.scripts.answers import Publication
from tokenyard.yard.requests import STATES

pytestmark = [pytest.mark.valkey_only, pytest.mark.usefixtures("wide_search")]


def finish(yard: PlayedYard, worker: str, request: Request, text: str = ANSWER) -> None:
    assignment = yard.assign(worker, request)
    said = {
        "text": text,
        "finish_reason": "stop",
        "usage": json_text(Usage(7, 2, 9, 3)),
        "timing": json_text({"queue_ms": 1500, "engine_ms": 2.0, "first_token_ms": 1.0}),
        "provenance": json_text(Provenance("adder", "", "vllm", "0.32", worker, 1)),
    }
    result = make_result(request.id, [1, 2], **said)
    yard.scripts.finish(worker, [Publication(assignment, result)])


def test_a_request_that_pools_shows_its_inputs_and_numbers(
    looker: Looker, yard: PlayedYard
) -> None:
    request = Request(
        id="pooled",
        inputs=["first text", "second text"],
        task="embed",
        pooling=PoolingParams(dimensions=2),
    )
    worker = yard.worker("w")
    assignment = yard.assign(worker, request)
    looker.actor = SEES
    running = seen(looker, request)
    yard.scripts.finish(worker, [Publication(assignment, _numbers(request))])
    ended = seen(looker, request)

    for said in ("first text", "2 inputs, 28 bytes of JSON", "embed", "dimensions"):
        assert said in running, said
    assert "0.5 0.25" in ended
    assert "inputs[1]: is too long" in ended


def _numbers(request: Request) -> Reply:
    return make_result(
        request.id,
        [],
        data=array("f", [0.5, 0.25]).tobytes(),
        shapes=json_text([[2], None]),
        errors=json_text({1: ErrorInfo("INVALID_REQUEST", "inputs[1]: is too long")}),
        input_tokens=json_text([3, 0]),
    )


# Its story


@pytest.mark.parametrize("state", STATES)
def test_a_request_of_each_state(looker: Looker, yard: PlayedYard, state: str) -> None:
    one_of_each_state(yard)
    client = "ann" if state in {"completed", "assigned", "cancelled"} else "bob"
    page = looker.get(f"/request?client={client}&id={state}")
    assert re.search(rf'<span class="badge[^"]*">{state}</span>', page)
    assert ("data-live" in page) == (state in {"waiting", "assigned"})
    assert ("request.cancel" in page) == (state in {"waiting", "assigned"})
    assert "request.requeue" not in page  # none of them was kept


def test_an_ended_request_tells_its_result_and_its_times(looker: Looker, yard: PlayedYard) -> None:
    request = asking()
    worker = yard.worker("w")
    finish(yard, worker, request)
    shown = seen(looker, request)
    for words in (
        "accepted as normal/",
        f"attempt 1: to {worker} (the test says so)",
        "first token of this attempt",
        "Finish reason stop",
        "Tokens out 2",
        "Tokens in 7, 3 of them cached",
        "Waited 1.500 s",
        f"Made by {worker} with adder on vllm 0.32, attempt 1",
        "are kept while it waits or runs",
    ):
        assert words in shown


def test_a_rescued_request_tells_each_attempt_and_the_fence(
    looker: Looker, yard: PlayedYard
) -> None:
    request = asking(stream=True)
    first, second = yard.worker("first"), yard.worker("second")
    assignment = yard.assign(first, request)
    yard.scripts.emit(first, [Publication(assignment, make_delta("q", 0, [1, 2, 3]))])
    yard.scripts.retire(first, "lost", "killed by signal 9")
    yard.rescue(first)
    shown = seen(looker, request)
    assert "attempt 1: its worker was lost: killed by signal 9" in shown
    assert "What that attempt still publishes is refused by its fence." in shown
    assert "the fence refused" not in shown
    yard.place(yard.waiting(request), second)
    yard.scripts.emit(first, [Publication(assignment, make_delta("q", 3, [4]))])
    page = look(looker, request)
    assert re.search(
        rf'<li class="warn">\s*<time [^>]*>[^<]*</time>\s*'
        rf"<p>attempt 1: the fence refused tokens of {first}</p>",
        page,
    )
    shown = text_of(page)
    assert f"attempt 2: to {second}" in shown
    assert f"Worker {second} ( its requests ), attempt 2" in shown
    assert "3 published" in shown


def test_a_waiting_request_says_why(looker: Looker, yard: PlayedYard) -> None:
    request = asking(tenant="acme", deadline_ms=2**53, priority=3, session="s1")
    yard.scripts.submit("low", [request])
    page = look(looker, request)
    shown = text_of(page)
    assert "no worker is ready" in shown
    assert "Tenant acme" in shown
    assert "Priority class low" in shown
    assert 'href="/board/tenants/acme"' in page
    assert "priority 3" in shown
    assert "session s1" in shown


def test_parameters_are_those_that_were_asked_for(looker: Looker, yard: PlayedYard) -> None:
    params = SamplingParams(max_tokens=77, top_p=0.5, stop=["<b>", "x" * 5000], seed=7)
    request = asking(params=params, metadata={"a": 1}, model="adder", stream=True)
    yard.submit(request)
    page = look(looker, request)
    shown = text_of(page)
    for words in ("max_tokens 77", "top_p 0.5", "seed 7", "temperature 1.0", "stream yes"):
        assert words in shown
    assert "metadata 1 field" in shown
    assert "(5,010 characters)" in shown
    assert "<b>" not in page
    assert "top_k" not in shown


def test_the_parameters_count_media(looker: Looker, yard: PlayedYard) -> None:
    media = {"audio": ["media:" + "0" * 64] * 2}
    request = Request(id="heard", tokens=pack_tokens([1]), media=media)
    yard.submit(request)
    assert "media 2 audio" in text_of(look(looker, request))


def test_a_dead_letter_is_linked_and_keeps_what_was_asked(looker: Looker, yard: PlayedYard) -> None:
    request = asking(params=SamplingParams(max_tokens=77))
    fail(yard, request, "POISONED: <i>it kills engines</i>")
    fail(yard, asking("other"))
    page = look(looker, request)
    letter = yard.connection.xrange(yard.keys.dead)[0][0].decode()
    assert f'href="/board/dead/{letter}"' in page
    assert "<i>" not in page
    assert "max_tokens 77" in text_of(page)
    [name] = values_of(page, "request")
    assert looker.do("request.requeue", {"request": name}).text == "1 request waits again."
    assert "waiting" in seen(looker, request)


def test_a_ledger_that_names_the_entry_of_another_shows_nothing_of_it(
    looker: Looker, yard: PlayedYard
) -> None:
    looker.actor = SEES
    waiting = yard.submit(asking("victim"))
    forged = {"state": "waiting", "sid": f"normal/{waiting.entry}"}
    yard.connection.hset(yard.keys.ledger("mallory", "q"), mapping=forged)
    page = looker.get("/request?client=mallory&id=q")
    assert PROMPT not in page
    assert "Its entry cannot be read." in page


@pytest.mark.parametrize("odd", ["9" * 5000, "9" * 19, "999999999", "-1", "x", ""])
def test_a_forged_ledger_is_shown_without_error(looker: Looker, yard: PlayedYard, odd: str) -> None:
    request = asking()
    yard.assign(yard.worker(), request)
    fields = {
        "attempt": odd,
        "ended": odd,
        "r1": f"{odd} w",
        "t" + odd: f"{odd}-1 w",
        "t2": f"{odd}-1 w",
        "sid": f"normal/{odd}-1",
        "not_before": odd,
    }
    yard.connection.hset(yard.keys.ledger("ann", "q"), mapping=fields)
    assert "Timeline" in look(looker, request)
    assert "q" in looker.get("/requests?client=ann&state=assigned&state=completed")


def test_an_unknown_request_is_not_found(looker: Looker) -> None:
    told = text_of(looker.get("/request?client=ann&id=%3Cb%3E", 404))
    assert "the yard knows no request '<b>'" in told
    assert "<b>" not in looker.get("/request?client=ann&id=%3Cb%3E", 404)
    assert "Give its client" in looker.get("/request?id=nobodys", 404)
    assert "1 to 200 bytes" in looker.get("/request?client=ann", 400)
    assert "client: give" in looker.get("/request?client=a*&id=q", 400)


def test_the_client_may_be_left_out_where_one_has_the_id(looker: Looker, yard: PlayedYard) -> None:
    yard.submit(make_request("q", client="ann"))
    assert "Client ann" in text_of(looker.get("/request?id=q"))
    yard.submit(make_request("q", client="bob"))
    told = text_of(looker.get("/request?id=q", 400))
    assert "Several clients may have a request with this id; these have one: ann, bob." in told


def test_a_search_for_the_client_that_stopped_early_says_so(
    looker: Looker, yard: PlayedYard, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = yard.connection.pipeline(transaction=False)
    for number in range(4000):
        pipeline.hset(yard.keys.ledger("bob", str(number)), mapping={"state": "waiting"})
    pipeline.execute()
    monkeypatch.setattr(one, "MOST_KEYS_FOR_ID", 1000)
    told = text_of(looker.get("/request?id=nobodys", 404))
    assert "'nobodys' among the first 1,000 keys of the server. Give its client." in told


@pytest.mark.parametrize("request_id", HOSTILE)
def test_hostile_names_are_text(looker: Looker, yard: PlayedYard, request_id: str) -> None:
    looker.actor = SEES
    request = make_request(
        request_id,
        client="ann",
        prompt=request_id,
        tokens=None,
        model=request_id,
        session=request_id,
        tenant=request_id,
        cache_salt=request_id,
        params=SamplingParams(stop=[request_id]),
    )
    yard.push(request_fields(request))
    page = looker.get(f"/request?client=ann&id={quote(request_id, safe='')}")
    for mark in ("<script>alert", "<img", "\x00", "\x1b", "\u202e", "\u202d", "\u200f", "\x9b"):
        assert mark not in page
    [name, *_] = values_of(page, "request")
    looker.do("request.cancel", {"request": name, "back": values_of(page, "back")[0]})
    assert "cancelled" in seen(looker, request)


# The bar


def test_the_bar_has_all_its_width_and_all_parts(looker: Looker, yard: PlayedYard) -> None:
    request = asking()
    first = yard.worker("first")
    yard.assign(first, request)
    yard.lose(first)
    finish_at = yard.worker("second")
    yard.place(yard.waiting(request), finish_at)
    page = look(looker, request)
    rects = re.findall(r'<rect class="life-(\w+)" x="(\d+)" y="0" width="(\d+)"', page)
    assert [phase for phase, *_ in rects] == ["waiting", "lost", "waiting", "answer"]
    x = 0
    for _, at, width in rects:
        assert int(at) == x
        assert int(width) > 0
        x += int(width)
    assert x == WIDTH


def test_a_request_that_never_arrived_has_no_bar(yard: PlayedYard, looker: Looker) -> None:
    yard.scripts.cancel("ann", "q", "for a test")
    page = looker.get("/request?client=ann&id=q")
    assert "<rect class" not in page.partition("<main")[2]
    assert "cancelled: 0 tokens" in page
    timeline = one.read_timeline(yard, "ann", "q")
    assert bar_of(timeline) == []


# What is hidden


def test_without_permission_only_lengths_are_shown(looker: Looker, yard: PlayedYard) -> None:
    running, ended, dead = asking("running", stream=True), asking("ended"), asking("dead")
    worker = yard.worker()
    assignment = yard.assign(worker, running)
    emitted = [Publication(assignment, make_delta("running", 0, [41, 42, 43], text=ANSWER))]
    yard.scripts.emit(worker, emitted)
    finish(yard, worker, ended)
    fail(yard, dead)
    for request in (running, ended, dead):
        page = look(looker, request)
        assert PROMPT not in page
        assert ANSWER not in page
        assert "41 42 43" not in page
        assert "not shown to you" in page
    assert "15 characters" in seen(looker, running)
    assert "3 published" in seen(looker, running)

    looker.actor = SEES
    assert PROMPT in look(looker, running)
    assert "41 42 43" in look(looker, running)
    assert ANSWER in look(looker, ended)
    assert PROMPT in look(looker, dead)


@pytest.mark.parametrize(
    ("fields", "length", "shown"),
    [
        ({"tokens": [5, 6, 7]}, "3 tokens", "5 6 7"),
        (
            {"tokens": None, "messages": [{"role": "user", "content": "<b>hi"}]},
            "1 message, ",
            '"content": "<b>hi"',
        ),
    ],
)
def test_prompts_of_each_kind(
    looker: Looker, yard: PlayedYard, fields: dict[str, Any], length: str, shown: str
) -> None:
    request = make_request("q", client="ann", **fields)
    yard.submit(request)
    assert length in seen(looker, request)
    assert shown not in seen(looker, request)
    looker.actor = SEES
    assert shown in seen(looker, request)
    assert "<b>" not in look(looker, request)


def test_a_million_characters_are_not_sent(looker: Looker, yard: PlayedYard) -> None:
    looker.actor = SEES
    request = make_request("q", client="ann", prompt="\u202e<x>" * 250_000, tokens=None)
    finish(yard, yard.worker(), request, text="<y>" * 300_000)
    page = look(looker, request)
    assert len(page) < 200_000
    assert "880,000 of 900,000 characters are left out" in page
    other = make_request("other", client="ann", prompt="\u202e<x>" * 250_000, tokens=None)
    yard.submit(other)
    page = look(looker, other)
    assert len(page) < 400_000
    assert "980,000 of 1,000,000 characters are left out" in page
    assert "\u202e" not in page


def test_cut_content_says_how_much_is_missing() -> None:
    assert content_of("x" * MOST_CHARACTERS, ()).cut == ""
    assert content_of("x" * (MOST_CHARACTERS + 1), ()).cut.startswith("1 of 20,001 characters")
    assert content_of(None, range(MOST_IDS)).cut == ""
    assert content_of(None, range(MOST_IDS + 1)).cut.startswith("1 of 2,001 token ids")


def test_several_choices_are_all_shown(looker: Looker, yard: PlayedYard) -> None:
    looker.actor = SEES
    request = asking(params=SamplingParams(n=2))
    worker = yard.worker()
    assignment = yard.assign(worker, request)
    choices = json.dumps(
        [{"index": 0, "tokens": [1], "text": "one"}, {"index": 1, "tokens": [2], "text": "two"}]
    )
    result = make_result("q", [1], choices=choices)
    yard.scripts.finish(worker, [Publication(assignment, result)])
    shown = seen(looker, request)
    assert "Choices 2" in shown
    assert "Answer 0 one Answer 1 two" in shown


def test_an_expired_request_tells_its_error(looker: Looker, yard: PlayedYard) -> None:
    request = asking()
    yard.answer(yard.submit(request), Code.DEADLINE_EXCEEDED)
    assert "DEADLINE_EXCEEDED the test says so" in seen(looker, request)
