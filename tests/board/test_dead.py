"""The pages of dead letters, and what operators do with them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from tests.board.looking import Fields, Looker, looking, text_of
from tests.cli.test_hostile_text import EVIL, moves
from tests.support.builders import entry_fields, make_request
from tests.support.servers import Server
from tests.support.yard import Yard
from tokenyard.admin import letter_lists
from tokenyard.admin.letter_changes import GONE, drop_letters, requeue_letters
from tokenyard.admin.letter_lists import LOOKED_AT, LetterFilter, read_page
from tokenyard.board.pages import dead_actions
from tokenyard.board.pages.dead import ACTIONS
from tokenyard.board.yard import Actor
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.wire import Request
from tokenyard.scripts import Scripts

MANY = 10_000
COUNT_S = dead_actions._COUNT_S


@pytest.fixture
def connection(valkey_broker: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_broker.url, socket_timeout=30.0) as connected:
        yield connected


@pytest.fixture
def yard(connection: redis.Redis, keys: Keys) -> Yard:
    return Yard(connection, keys, Scripts(connection, keys))


@pytest.fixture
def looker(
    valkey_broker: Server, connection: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Looker]:
    monkeypatch.setattr(dead_actions, "_COUNT_S", 30.0)  # on a busy machine, too
    with looking(monkeypatch, valkey_broker.url, connection, keys) as made:
        yield made


def bury(
    yard: Yard,
    request: Request | None = None,
    reason: str = "POISONED: 2 workers crashed while it ran alone",
    **more: bytes,
) -> str:
    """Write a dead letter; its name."""
    dead = {b"dead_reason": reason.encode(errors="surrogatepass"), b"dead_sid": b"low/1-0"}
    fields = entry_fields(request or make_request(), **more) | dead
    added: Any = yard.connection.xadd(yard.keys.dead, fields)  # type: ignore[arg-type]
    return added.decode()


def bury_many(yard: Yard, count: int) -> list[str]:
    """Write letters of two clients in turn, every tenth of another reason."""
    pipeline = yard.connection.pipeline(transaction=False)
    for number in range(count):
        request = make_request(f"q{number}", client="ann" if number % 2 else "bob", model="adder")
        reason = b"INFERENCE_ERROR: failed 3 times" if number % 10 == 0 else b"POISONED: signal 11"
        fields = entry_fields(request) | {b"dead_reason": reason, b"dead_sid": b"low/1-0"}
        pipeline.xadd(yard.keys.dead, fields)  # type: ignore[arg-type]
    return [added.decode() for added in pipeline.execute()]


def left(yard: Yard) -> list[str]:
    return [entry.decode() for entry, _ in yard.connection.xrange(yard.keys.dead)]


def asked_of(looker: Looker, action: str, fields: Fields) -> str:
    """What the page that asks says."""
    return text_of(looker.ask(action, fields))


class Calls:
    """Commands that the server was sent, by their names."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._before = self._all()

    def _all(self) -> dict[str, int]:
        found: Any = self._connection.info("commandstats")
        return {name.removeprefix("cmdstat_"): each["calls"] for name, each in found.items()}

    def made(self) -> dict[str, int]:
        """Since the beginning, without those that count them."""
        now = self._all()
        return {
            name: calls - self._before.get(name, 0)
            for name, calls in now.items()
            if calls > self._before.get(name, 0) and name not in {"info", "hello", "ping"}
        }


# Pages


def test_no_letters_are_told_in_words(looker: Looker) -> None:
    page = looker.get("/dead")
    assert "There are no dead letters" in page
    assert "<table>" not in page
    assert "Requeue all" not in page


def test_letters_are_listed_newest_first_with_why_they_died(looker: Looker, yard: Yard) -> None:
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


def test_a_page_of_ten_thousand_letters_is_bounded(looker: Looker, yard: Yard) -> None:
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


def test_a_filter_reads_a_bounded_part_and_goes_on(looker: Looker, yard: Yard) -> None:
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


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"reason": "POISONED"}, ["c", "a"]),
        ({"reason": "other"}, ["d"]),
        ({"model": "adder"}, ["a"]),
        ({"client": "bob"}, ["b"]),
        ({"tenant": "lab"}, ["c"]),
        ({"text": "SEGV"}, ["c"]),
        ({"text": "segv", "client": "bob"}, []),
        ({"until": "2026-01-01T00:00"}, []),
        ({"since": "2026-01-01T00:00"}, ["d", "c", "b", "a"]),
    ],
)
def test_letters_are_filtered(
    looker: Looker, yard: Yard, given: dict[str, str], found: list[str]
) -> None:
    bury(yard, make_request("a", client="ann", model="adder"))
    bury(yard, make_request("b", client="bob"), "INFERENCE_ERROR: no memory")
    bury(yard, make_request("c", client="ann", tenant="lab"), "POISONED: ended by SIGSEGV")
    bury(yard, make_request("d", client="ann"), "it died")
    page = looker.get("/dead", parameters=given)
    assert re.findall(r"(?:ann|bob)/(\w)</bdi>", page) == found
    assert found or "No dead letter matches" in page


@pytest.mark.parametrize(
    "given", [{"since": "yesterday"}, {"show": "7"}, {"before": "x"}, {"reason": "no"}]
)
def test_senseless_filters_are_refused(looker: Looker, given: dict[str, str]) -> None:
    assert "give" in looker.get("/dead", parameters=given, status=400)


def test_a_letter_has_the_evidence_of_its_crashes(looker: Looker, yard: Yard) -> None:
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


def test_prompts_and_unknown_fields_are_shown_to_some_only(looker: Looker, yard: Yard) -> None:
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


def test_hostile_letters_are_shown_as_text(looker: Looker, yard: Yard) -> None:
    markup = "<script>alert(1)</script><img src=x onerror=alert(2)>'\""
    evil = f"{markup}{EVIL}"
    long = "x" * 1_000_000
    names = [
        bury(yard, make_request(f"id {evil}"[:150], client="ann", model=evil), f"POISONED: {evil}"),
        bury(yard, make_request("long", model=long, session=long), f"POISONED: {long}"),
        yard.connection.xadd(yard.keys.dead, {evil: evil, "dead_reason": b"\xff\xfe"}).decode(),
        # The last possible entry: its time is none that can be written.
        yard.connection.xadd(
            yard.keys.dead, {"id": "q", "common": "[" * 100_000}, id=f"{2**64 - 1}-1"
        ).decode(),
    ]
    pages = [looker.get("/dead"), looker.get("/dead", parameters={"text": markup, "model": evil})]
    pages += [looker.get(f"/dead/{name}") for name in names]
    pages += [looker.get("/do/dead.drop", parameters={"letter": names, "back": "/board/dead"})]
    for page in pages:
        assert "<script>alert" not in page
        assert "<img" not in page
        assert not moves(re.sub(r'value="[^"]*"', "", page))
        assert len(page) < 200_000
    assert "(1,000,000 characters)" in pages[3]


# Actions


def test_one_letter_is_requeued(looker: Looker, yard: Yard) -> None:
    request = make_request("q", client="ann")
    letter, other = bury(yard, request), bury(yard)
    asked = asked_of(looker, "dead.requeue", {"letter": letter})
    assert "Requeue 1 dead letter." in asked
    assert f"{letter} (ann/q)" in asked
    assert left(yard) == [letter, other]

    done = looker.do("dead.requeue", {"letter": letter, "why": "the bug is fixed"})

    assert (done.text, done.target) == ("1 dead letter requeued.", f"dead letter {letter}")
    assert (done.action, done.why) == ("dead.requeue", "the bug is fixed")
    assert left(yard) == [other]
    assert yard.ledger(request)["state"] == "waiting"
    assert len(yard.intake("low")) == 1


def test_selected_letters_are_dropped(looker: Looker, yard: Yard) -> None:
    names = bury_many(yard, 300)
    chosen = names[50:250]
    asked = asked_of(looker, "dead.drop", {"letter": chosen})
    assert "Drop 200 dead letters." in asked
    assert "and 180 more" in asked
    yard.connection.xdel(yard.keys.dead, *chosen[:5])
    done = looker.do("dead.drop", {"letter": chosen})
    assert done.text == "195 dead letters dropped. Not dropped: 5 (gone)."
    assert left(yard) == names[:50] + names[250:]


def test_what_cannot_run_again_is_told_with_the_reason(looker: Looker, yard: Yard) -> None:
    waits, fine, runs = make_request("waits"), make_request("fine"), make_request("runs")
    letters = [bury(yard, each) for each in (waits, fine, runs)]
    other = make_request("other")
    letters.append(bury(yard, other, "ID_REUSED: the id 'other' is known with another request"))
    letters.append(yard.connection.xadd(yard.keys.dead, {"dead_reason": "id: is missing"}).decode())
    yard.submit(waits)
    yard.assign(yard.worker(), runs)
    yard.connection.hset(yard.keys.ledger(other.client, other.id), "state", "completed")

    done = looker.do("dead.requeue", {"letter": [*letters, "1-1"]})

    assert done.text.startswith("1 dead letter requeued. Not requeued: ")
    for why in (
        "1 (gone)",
        "1 (its request waits already)",
        "1 (its request runs already)",
        "1 (its id belongs to another request)",
        "1 (without a client that could be answered)",
    ):
        assert why in done.text
    assert left(yard) == [letters[0], *letters[2:]]
    assert set(done.details["not done"].split()) == set(left(yard))


def test_a_letter_that_disappears_meanwhile_was_gone(yard: Yard) -> None:
    bury(yard)
    heads = read_page(yard.connection, yard.keys, LetterFilter()).heads
    yard.connection.delete(yard.keys.dead)
    assert requeue_letters(yard.connection, yard.keys, heads) == [GONE]
    assert drop_letters(yard.connection, yard.keys, heads) == [GONE]


def test_all_that_match_are_requeued_but_not_later_ones(looker: Looker, yard: Yard) -> None:
    bury_many(yard, 1_000)
    page = looker.get("/dead", parameters={"client": "ann"})
    [upto] = set(re.findall(r'name="upto" value="(\d+-\d+)"', page))
    later = bury(yard, make_request("later", client="ann"))
    fields = {"client": "ann", "upto": upto}

    asked = asked_of(looker, "dead.requeue", fields)
    assert "Requeue 500 dead letters with client ann, up to the one of 20" in asked
    assert "and 480 more" in asked
    done = looker.do("dead.requeue", fields)

    assert done.text == "500 dead letters requeued."
    assert done.target == "dead letters with client ann"
    assert len(left(yard)) == 501
    assert left(yard)[-1] == later
    assert len(yard.intake("low")) == 500


def test_ten_thousand_letters_are_dropped_in_bounded_pieces(looker: Looker, yard: Yard) -> None:
    names = bury_many(yard, MANY)
    later = bury(yard)
    fields = {"upto": names[-1]}
    assert "Drop 10,000 dead letters, up to" in asked_of(looker, "dead.drop", fields)
    calls = Calls(yard.connection)
    done = looker.do("dead.drop", {**fields, "back": "/board/dead"})
    made = calls.made()
    assert done.text == "10,000 dead letters dropped."
    assert left(yard) == [later]
    assert made["xrange"] <= MANY // 200 + 20


def test_pieces_of_long_letters_are_small(
    looker: Looker, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letter_lists, "_PIECE_BYTES", 100_000)
    for number in range(60):
        bury(yard, make_request(f"q{number}", prompt="x" * 20_000))
    calls = Calls(yard.connection)
    done = looker.do("dead.drop", {"upto": left(yard)[-1]})
    assert done.text == "60 dead letters dropped."
    # Twenty, and then five at a time.
    assert calls.made()["xrange"] >= 1 + 40 // 5


def test_the_page_that_asks_counts_for_a_bounded_time(
    looker: Looker, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given reads that take 50 ms, I expect a few of them, and all to be dropped."""
    names = bury_many(yard, MANY)
    fields = {"upto": names[-1], "client": "bob"}
    reads = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(reads) * 0.05)
    monkeypatch.setattr(letter_lists, "time", clock)
    monkeypatch.setattr(dead_actions, "_COUNT_S", COUNT_S)
    calls = Calls(yard.connection)

    asked = asked_of(looker, "dead.drop", fields)

    assert calls.made()["xrange"] <= 6
    assert re.search(r"Drop at least [3-5]\d\d dead letters with client bob", asked)
    done = looker.do("dead.drop", fields)
    assert done.text == "5,000 dead letters dropped."


def test_an_action_that_takes_too_long_says_so(
    looker: Looker, yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenyard.board.pages.dead_actions._ACT_S", -1.0)
    monkeypatch.setattr("tokenyard.board.pages.dead_actions._COUNT_S", -1.0)
    names = bury_many(yard, 300)
    asked = asked_of(looker, "dead.drop", {"upto": names[-1], "client": "bob"})
    assert "Drop at least 10 dead letters with client bob" in asked  # of the first twenty
    done = looker.do("dead.drop", {"upto": names[-1]})
    assert "It stopped after" in done.text
    assert left(yard) == names


@pytest.mark.parametrize("action", [each.name for each in ACTIONS])
@pytest.mark.parametrize(
    "fields", [{}, {"upto": "x"}, {"letter": "x"}, {"letter": [f"1-{n}" for n in range(501)]}]
)
def test_forms_without_sense_change_nothing(
    looker: Looker, yard: Yard, action: str, fields: dict[str, Any]
) -> None:
    letter = bury(yard)
    looker.get(f"/do/{action}", parameters=fields, status=400)
    assert looker.post(action, fields).status_code == 400
    assert left(yard) == [letter]


@pytest.mark.parametrize("action", [each.name for each in ACTIONS])
def test_viewers_see_letters_and_change_none(looker: Looker, yard: Yard, action: str) -> None:
    letter = bury(yard)
    looker.actor = Actor("olga", "viewer")
    for path in ("/dead", f"/dead/{letter}"):
        page = looker.get(path)
        assert letter in page
        assert "/board/do/dead" not in page
        assert "checkbox" not in page
    looker.get(f"/do/{action}", parameters={"letter": letter}, status=403)
    assert looker.post(action, {"letter": letter}).status_code == 403
    assert left(yard) == [letter]
    looker.actor = Actor("olga", "operator")
    assert looker.post(action, {"letter": letter}).status_code == 303
    assert left(yard) == []


@pytest.mark.parametrize("path", ["/dead", "/batches"])
def test_an_open_page_changes_only_when_something_has(
    looker: Looker, yard: Yard, path: str
) -> None:
    bury(yard)
    first, second = (looker.get(path, parameters={"look": number}) for number in "12")
    assert re.sub(r'nonce="[^"]*"', "", first) == re.sub(r'nonce="[^"]*"', "", second)
