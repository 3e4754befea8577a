"""The conversation of a client, carried out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.builders import make_request, make_result
from tokenyard.client.build import PreparedRequest, SubmissionTerms
from tokenyard.client.core import BLOCK_MS, IDLE_BLOCK_MS, ClientCore
from tokenyard.client.operations import Operation, Steps
from tokenyard.client.router import CHECK_AFTER_S
from tokenyard.client.submission import bursts
from tokenyard.client.sync import LISTEN_TIMEOUT_S
from tokenyard.protocol.errors import BrokerUnavailable, BrokerUnsuitable, QueueFull
from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.replies import encode_reply
from tokenyard.protocol.wire import template_of
from tokenyard.scripts.answers import Acceptance, Submitted
from tokenyard.scripts.calls import Call


def make_core() -> ClientCore:
    return ClientCore("redis://nowhere", "yard", "me", None, 1.0, 1.0)


def prepare(
    request_id: str, priority_class: PriorityClass = "normal", size: int = 1
) -> PreparedRequest:
    request = make_request(request_id)
    terms = SubmissionTerms(priority_class)
    return PreparedRequest(request, terms, None, size, template_of(request))


def command(operation: Operation) -> Any:
    """The one command of an operation."""
    [only] = operation.commands
    return only


def read_after_time(steps: Steps[None], time_asked: Any) -> Any:
    """Answer the question for the broker's time; the read that follows."""
    assert command(time_asked) == ("TIME",)
    return steps.send([(1_800_000_000, 0)])


def frame(request_id: str) -> bytes:
    return b"\x91" + encode_reply(make_result(request_id, [1]))


def test_a_burst_ends_by_number_size_and_class() -> None:
    many = [prepare(str(number)) for number in range(600)]
    assert [len(burst) for burst in bursts(enumerate(many))] == [256, 256, 88]
    large = [
        prepare("a", size=700_000),
        prepare("b", size=700_000),
        prepare("c", size=9_000_000),
    ]
    assert [len(burst) for burst in bursts(enumerate(large))] == [1, 1, 1]
    mixed = [prepare("a"), prepare("b", "high"), prepare("c", "high")]
    assert [[index for index, _ in burst] for burst in bursts(enumerate(mixed))] == [[0], [1, 2]]
    assert list(bursts([])) == []


def test_listening_reads_on_where_the_server_went_away() -> None:
    core = make_core()
    steps = core.listen()
    first = read_after_time(steps, next(steps))
    assert "BLOCK" not in command(first), "the past is read without waiting"
    read = steps.send([[[b"replies", [(b"5-1", {b"frame": frame("x")})]]]])
    assert "BLOCK" in command(read)
    pauses = []
    for _ in range(10):
        pause = steps.throw(BrokerUnavailable("gone"))
        pauses.append(pause.seconds)
        assert command(read_after_time(steps, steps.send(None)))[-1] == "5-1"
    assert pauses[0] < 0.1
    assert max(pauses) <= 2.0


def test_listening_ends_with_the_client() -> None:
    core = make_core()
    steps = core.listen()
    read_after_time(steps, next(steps))
    core.close()
    with pytest.raises(StopIteration):
        steps.send([[[b"replies", [(b"5-1", {b"frame": frame("x")})]]]])
    with pytest.raises(StopIteration):
        next(core.leave())


def test_a_submission_that_breaks_is_followed_no_longer() -> None:
    core = make_core()
    steps = core.submitter.submit([prepare("q")])
    assert isinstance(next(steps), Call)
    with pytest.raises(BrokerUnavailable):
        steps.throw(BrokerUnavailable("gone"))
    steps = core.submitter.submit([prepare("q")])
    assert isinstance(next(steps), Call), "so that it can be submitted again"


def test_a_full_queue_leaves_the_rest_unsent() -> None:
    steps = make_core().submitter.submit([prepare(str(number)) for number in range(300)])
    call = next(steps)
    assert isinstance(call, Call)
    accepted = [Acceptance(Submitted.ACCEPTED, sid="normal/1-1")] * 255
    with pytest.raises(QueueFull) as caught:
        steps.send([*accepted, Acceptance(Submitted.FULL, retry_after_ms=1500)])
    assert caught.value.retry_after_s == 1.5
    assert [pending.id for pending in caught.value.accepted] == [str(n) for n in range(255)]


def test_an_error_that_stays_ends_listening() -> None:
    steps = make_core().listen()
    next(steps)
    with pytest.raises(BrokerUnsuitable):
        steps.throw(BrokerUnsuitable("no permission"))


def test_a_blocking_read_ends_before_its_socket_gives_up_and_a_request_is_looked_up() -> None:
    """Given a server that stands still for 3 s, I expect that no client loses its connection."""
    assert max(BLOCK_MS, IDLE_BLOCK_MS) / 1000 + 3.0 <= LISTEN_TIMEOUT_S
    assert IDLE_BLOCK_MS / 1000 < CHECK_AFTER_S


def test_a_client_with_nothing_under_way_reads_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given nothing under way, and nothing that is still to be deleted, I expect longer reads."""
    monkeypatch.setattr("tokenyard.client.router.TRIM_EVERY_S", 0.0)
    core = make_core()
    steps = core.listen()
    read_after_time(steps, next(steps))
    assert _block_ms(steps.send([None])) == IDLE_BLOCK_MS
    next(core.submitter.submit([prepare("q")]))
    assert _block_ms(steps.send([None])) == BLOCK_MS
    monkeypatch.setattr("tokenyard.client.router.TRIM_EVERY_S", 60.0)
    answered = [[b"replies", [(b"5-1", {b"frame": frame("q")})]]]
    assert _block_ms(steps.send([answered])) == BLOCK_MS, "its reply is still to be deleted"
    monkeypatch.setattr("tokenyard.client.router.TRIM_EVERY_S", 0.0)
    assert command(steps.send([None]))[0] == "XTRIM"
    assert _block_ms(steps.send([None])) == IDLE_BLOCK_MS


def _block_ms(operation: Operation) -> int:
    words = command(operation)
    return int(words[words.index("BLOCK") + 1])
