"""Dead letters for an operator: listed, shown, requeued, dropped."""

from __future__ import annotations

from tests.support.builders import make_request
from tests.support.yard import PlayedYard
from tokenyard.ops.letters import GONE, drop_letters
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.wire import Request
from tokenyard.scripts.answers import Answered
from tokenyard.yard.letters import WholeLetter, dead_letters, find_letter


def kill(
    yard: PlayedYard, request: Request, *, priority_class: PriorityClass = "normal"
) -> WholeLetter:
    """Let a request end as a dead letter; the letter."""
    waiting = yard.submit(request, priority_class)
    assert yard.answer(waiting, Code.POISONED, dead="it killed its worker") is Answered.DONE
    return dead_letters(yard)[0]


def test_a_letter_has_client_and_reason(yard: PlayedYard) -> None:
    request = make_request("q", client="ann", model="adder", tokens=[1, 300])
    letter = kill(yard, request, priority_class="high")

    assert (letter.client, letter.id, letter.model) == ("ann", "q", "adder")
    assert (letter.reason, letter.intake) == ("it killed its worker", "high")
    assert letter.fields["tokens"] == "1,300"
    assert "dead_reason" not in letter.fields
    seconds, _ = yard.connection.time()
    assert abs(letter.died_ms / 1000 - seconds) < 60


def test_an_unanswerable_dead_letter_is_shown(yard: PlayedYard) -> None:
    entry = yard.push({"prompt": b"\xff\x00", "tokens": b"[1]"}).entry
    yard.scripts.bury(yard.token, "normal", entry, "id: is missing")
    (letter,) = dead_letters(yard)

    assert not letter.is_answerable
    assert (letter.fields["prompt"], letter.fields["tokens"]) == ("ff00", "[1]")


def test_a_letter_is_found_by_its_name_or_its_requests_id(yard: PlayedYard) -> None:
    first, _other = kill(yard, make_request("q")), kill(yard, make_request("p"))

    assert find_letter(yard, first.letter) == first
    assert find_letter(yard, "q") == first
    assert find_letter(yard, "1-1") is None
    assert find_letter(yard, "nobody") is None


def test_a_letter_is_dropped_once_and_the_result_stays(yard: PlayedYard) -> None:
    request = make_request("q")
    letter = kill(yard, request)

    assert drop_letters(yard, [letter]) == {letter.letter: ""}
    assert drop_letters(yard, [letter]) == {letter.letter: GONE}
    assert yard.result(request) is not None
