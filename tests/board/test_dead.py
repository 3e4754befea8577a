"""The pages of dead letters."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.board.calls import Calls
from tests.board.looking import Looker, text_of
from tests.support.builders import make_request
from tests.support.letters import MANY, bury, bury_many, left
from tests.support.yard import PlayedYard
from tokenyard.board.page import Actor
from tokenyard.ops.letters import wanted_letters
from tokenyard.protocol.errors import Code
from tokenyard.yard.letters import LOOKED_AT, LetterFilter

pytestmark = pytest.mark.valkey_only


def test_no_letters_are_told_in_words(looker: Looker) -> None:
    page = looker.get("/dead")
    assert "There are no dead letters" in page
    assert "<table>" not in page
    assert "Requeue all" not in page


def test_letters_are_listed_newest_first_with_why_they_died(
    looker: Looker, yard: PlayedYard
) -> None:
    bury(yard, make_request("q1", client="ann", model="adder", tenant="lab"))
    bury(yard, make_request("q/2", client="bob"), "INFERENCE_ERROR: failed 3 times", crashes=b"2")
    nobodys: Any = yard.connection.xadd(
        yard.keys.dead, {"dead_reason": "id: is missing", "dead_sid": "low/1-0", "prompt": "x"}
    )
    page = looker.get("/dead")
    shown = text_of(page)
    assert "3 dead letters" in shown
    assert shown.index("id: is missing") < shown.index("bob/q/2") < shown.index("ann/q1")
    assert "INFERENCE_ERROR failed 3 times" in shown
    assert "client=bob&amp;id=q%2F2" in page
    assert f"/board/dead/{nobodys.decode()}" in page
    assert "no client" in shown
    assert [word in shown for word in ("adder", "lab")] == [True, True]


@pytest.mark.long
def test_a_page_of_ten_thousand_letters_is_bounded(looker: Looker, yard: PlayedYard) -> None:
    names = bury_many(yard, MANY)
    looker.get("/dead", parameters={"show": "100"})  # opens its connection
    calls = Calls(yard.connection)
    page = looker.get("/dead")
    made = calls.made()
    assert "10,000 dead letters" in text_of(page)
    assert sum(made.values()) <= 6, made
    # All pages together have each letter once.
    shown: list[str] = []
    path = "/dead?show=200"
    while path:
        page = looker.get(path)
        shown += re.findall(r'value="(\d+-\d+)" aria-label="Select', page)
        older = re.search(r'href="/board(/dead\?[^"]+)" rel="next"', page)
        path = older[1].replace("&amp;", "&") if older else ""
    assert shown == names[::-1]


def test_a_filter_reads_a_bounded_part_and_goes_on(looker: Looker, yard: PlayedYard) -> None:
    first = bury(yard, make_request("first", client="rare"))
    bury_many(yard, LOOKED_AT + 500)
    looker.get("/dead")
    calls = Calls(yard.connection)
    page = looker.get("/dead", parameters={"client": "rare"})
    made = calls.made()
    assert "None of the newest" in page
    assert made["xrevrange"] <= 2 + LOOKED_AT // 200 + 1
    further = re.search(r'href="/board(/dead\?[^"]+)" rel="next">Look further', page)
    assert further is not None
    assert first in looker.get(further[1].replace("&amp;", "&"))


def test_a_form_says_which_letters_are_wanted() -> None:
    form = {"reason": "POISONED", "model": "adder", "client": "ann", "tenant": "lab", "text": "x"}
    assert wanted_letters(form) == LetterFilter(
        code="POISONED", model="adder", client="ann", tenant="lab", text="x"
    )


@pytest.mark.parametrize("name", ["since", "until"])
def test_a_time_bounds_the_list(looker: Looker, yard: PlayedYard, name: str) -> None:
    bury(yard)
    page = looker.get("/dead", parameters={name: "2026-01-01T00:00"})
    assert ("No dead letter matches" in page) == (name == "until")


@pytest.mark.parametrize(
    "given", [{"since": "yesterday"}, {"show": "7"}, {"before": "x"}, {"reason": "no"}]
)
def test_senseless_filters_are_refused(looker: Looker, given: dict[str, str]) -> None:
    assert "give" in looker.get("/dead", parameters=given, status=400)


@pytest.mark.parametrize(
    ("text", "since_ms"),
    [
        ("2026-11-23T06:15", 1_795_414_500_000),
        ("2026-11-23T06:15Z", 1_795_414_500_000),
        ("2026-11-23T08:15+02:00", 1_795_414_500_000),
        ("0001-01-01T00:00", 1),
    ],
)
def test_a_time_is_in_utc_unless_it_has_an_offset(text: str, since_ms: int) -> None:
    assert wanted_letters({"since": text}).since_ms == since_ms


def test_a_letter_has_the_evidence_of_its_crashes(looker: Looker, yard: PlayedYard) -> None:
    request = make_request("q", client="ann", tokens=[5, 6], tenant="")
    for _ in range(2):
        worker = yard.worker()
        waiting = yard.waiting(request) if yard.ledger(request) else yard.submit(request)
        yard.place(waiting, worker, alone=True)
        yard.scripts.retire(worker, "crashed", "ended by SIGSEGV")
        yard.rescue(worker)
    why = "POISONED: 2 workers crashed while it ran alone"
    yard.answer(yard.waiting(request), Code.POISONED, dead=why)
    [letter] = left(yard)

    shown = text_of(looker.get(f"/dead/{letter}"))

    assert "2 workers crashed while it ran alone" in shown
    assert shown.count("crashed") >= 3
    assert shown.count("ended by SIGSEGV") >= 2
    assert "the test says so" in shown
    assert "Crashes while it ran alone 2" in shown
    assert "tokens 3 hidden" in shown


def test_a_letter_that_is_gone_is_not_found(looker: Looker) -> None:
    for name in ("1-1", "nonsense", "99999999999999999999-0"):
        assert "There is no dead letter" in looker.get(f"/dead/{name}", status=404)


def test_prompts_and_unknown_fields_are_shown_to_some_only(
    looker: Looker, yard: PlayedYard
) -> None:
    fields = {"published": b"\x07\0\0\0", "surprise": b"a secret"}
    letter = bury(yard, make_request("q", prompt="my secret " * 2_000), **fields)
    looker.actor = Actor("olga", "admin")
    page = looker.get(f"/dead/{letter}")
    assert "secret" not in page
    assert "20,000" in text_of(page)
    looker.actor = Actor("olga", "viewer", shows_content=True)
    page = looker.get(f"/dead/{letter}?again=1")
    assert page.count("my secret") == 800
    assert "(20,000 characters)" in page
    assert "a secret" in page


@pytest.mark.parametrize("path", ["/dead", "/batches"])
def test_an_open_page_changes_only_when_something_has(
    looker: Looker, yard: PlayedYard, path: str
) -> None:
    bury(yard)
    first, second = looker.get(path), looker.get(path)
    assert re.sub(r'nonce="[^"]*"', "", first) == re.sub(r'nonce="[^"]*"', "", second)
