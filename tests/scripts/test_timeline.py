"""The timeline that `tokenyard explain` reads from a ledger."""

from __future__ import annotations

import pytest

from tests.support.builders import make_request, worker_json
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order
from tokenyard.protocol.errors import Code, UnknownRequest
from tokenyard.protocol.replies import Provenance, json_text
from tokenyard.protocol.wire import Request, request_fields
from tokenyard.yard.timeline import Timeline, read_timeline

NAME = "q"


def explain(yard: PlayedYard, request: Request) -> Timeline:
    return read_timeline(yard, request.client, request.id)


def texts(timeline: Timeline) -> str:
    events = timeline.events()
    assert [event.at_ms for event in events] == sorted(event.at_ms for event in events)
    return "\n".join(event.text for event in events)


def test_an_unknown_request_raises(yard: PlayedYard) -> None:
    with pytest.raises(UnknownRequest, match="'q'"):
        explain(yard, make_request(NAME))


def test_a_completed_request_has_attempt_and_result(yard: PlayedYard, worker: str) -> None:
    request = make_request(NAME)
    assignment = yard.assign(worker, request)
    said = {
        "timing": json_text({"queue_ms": 1, "engine_ms": 2.0, "first_token_ms": 1.0}),
        "finish_reason": "stop",
    }
    yard.finish(worker, assignment, [1, 2], **said)

    timeline = explain(yard, request)

    assert (timeline.state, timeline.server_id) == ("completed", assignment.sid)
    [attempt] = timeline.attempts
    assert (attempt.number, attempt.worker) == (1, worker)
    assert attempt.why == "the test says so"
    assert timeline.result.tokens == [1, 2]
    assert timeline.accepted_ms <= attempt.assigned_ms <= timeline.ended_ms <= timeline.now_ms
    assert timeline.started_ms == timeline.ended_ms - 2
    said_of_it = texts(timeline)
    for words in (
        "accepted as normal/",
        "to w.",
        "the test says so",
        "first token",
        "completed: 2",
    ):
        assert words in said_of_it


def test_a_request_that_pools_has_numbers_and_no_tokens(yard: PlayedYard, worker: str) -> None:
    request = make_request(NAME, task="embed", inputs=["a", "b"])
    assignment = yard.assign(worker, request)
    yard.finish(worker, assignment, shapes="[[2],null]", errors='{"1":{"code":"X","message":""}}')

    assert "completed: numbers of 2 inputs, of which 1 failed" in texts(explain(yard, request))


def test_media_are_told_while_they_are_there(yard: PlayedYard, worker: str) -> None:
    request = make_request(NAME)
    yard.connection.set(yard.keys.media(request.client, NAME), bytes(2**20))
    yard.assign(worker, request)

    assert ", with 1.0 MiB of media" in texts(explain(yard, request))


@pytest.mark.parametrize(
    ("epochs", "said"),
    [({"epoch": 5}, ", epoch 5"), ({"epoch": 5, "first_epoch": 4}, ", epoch 5 (begun in 4)")],
)
def test_a_result_with_epochs_names_them(
    yard: PlayedYard, worker: str, epochs: dict[str, int], said: str
) -> None:
    request = make_request(NAME)
    assignment = yard.assign(worker, request)
    made = Provenance("adder", "", "simulated", "1", worker, 1, **epochs)
    yard.finish(worker, assignment, [1], provenance=json_text(made))

    assert texts(explain(yard, request)).endswith(f"with adder on simulated 1{said}")


def test_lost_workers_are_earlier_attempts(yard: PlayedYard) -> None:
    request = make_request(NAME, stream=True)
    first, second = yard.worker("first"), yard.worker("second")
    yard.emit(first, yard.assign(first, request), [1, 2, 3])
    yard.scripts.retire(first, "lost", "killed by signal 9")
    yard.rescue(first)
    yard.place(yard.waiting(request), second)

    timeline = explain(yard, request)

    assert (timeline.state, timeline.tokens_published) == ("assigned", 3)
    lost, running = timeline.attempts
    assert (lost.worker, lost.given_back, lost.reason) == (first, "lost", "killed by signal 9")
    assert (running.worker, running.given_back, running.given_back_ms) == (second, "", None)
    assert running.waited_ms <= running.assigned_ms - lost.assigned_ms
    assert "attempt 1: its worker was lost: killed by signal 9" in texts(timeline)
    assert "3 tokens published so far" in texts(timeline)


def test_what_the_fence_refused_is_told_with_worker_attempt_and_count(yard: PlayedYard) -> None:
    request = make_request(NAME, stream=True)
    first, second = yard.worker("first"), yard.worker("second")
    assignment = yard.assign(first, request)
    yard.scripts.retire(first, "lost", "killed by signal 9")
    yard.emit(first, assignment, [1])
    assert f"attempt 1: the fence refused tokens of {first}\n" in texts(explain(yard, request))
    yard.rescue(first)
    yard.place(yard.waiting(request), second)
    yard.finish(second, assignment)

    timeline = explain(yard, request)

    last = timeline.last_refusal
    assert last is not None
    assert (timeline.refusals, last.worker, last.attempt, last.what) == (2, second, 1, "result")
    assert timeline.attempts[1].assigned_ms <= last.at_ms <= timeline.now_ms
    said = f"attempt 1: the fence refused result of {second}, the last of 2 refusals"
    assert [event.text for event in timeline.events() if event.kind == "refused"] == [said]


def test_a_request_after_a_fault_waits_for_its_pause(yard: PlayedYard, worker: str) -> None:
    request = make_request(NAME)
    assignment = yard.assign(worker, request)
    yard.scripts.hand_back(worker, assignment, 60_000, "out of memory")

    timeline = explain(yard, request)

    assert (timeline.state, timeline.attempts[0].given_back) == ("waiting", "fault")
    assert timeline.attempts[0].reason == "out of memory"
    assert "tried again in" in timeline.waits_for
    assert "out of memory" in timeline.waits_for


def test_a_waiting_request_has_a_reason(yard: PlayedYard) -> None:
    request = make_request(NAME, model="adder")
    yard.submit(priority_class="high")
    yard.submit(request)
    assert explain(yard, request).waits_for == "no worker is ready"

    yard.worker()
    waits_for = explain(yard, request).waits_for
    assert waits_for == "intake normal holds 1 request, the intakes before it 1"

    other = make_request("other", model="multiplier")
    yard.submit(other)
    assert explain(yard, other).waits_for == "no worker with model multiplier is ready"

    yard.scripts.resign(yard.token)
    assert "no coordinator leads" in texts(explain(yard, request))


@pytest.mark.parametrize("scope", ["all", "model:adder", "worker:w"])
def test_a_request_that_waits_for_a_pause_names_its_operator(yard: PlayedYard, scope: str) -> None:
    yard.worker("w")
    order = Order(signal="PAUSE", scope=scope, by="kim@north", why="its driver")
    Signals(yard).give(order)
    request = make_request(NAME, model="adder")
    yard.submit(request)

    timeline = explain(yard, request)

    [pause] = timeline.pauses
    assert (pause.scope, pause.by, pause.why) == (scope, "kim@north", "its driver")
    assert 0 < pause.since_ms <= timeline.now_ms
    assert f"waits: {pause.text(timeline.now_ms)}" in texts(timeline)

    # After the pause the timeline does not mention it.
    Signals(yard).give(Order(signal="UNPAUSE", scope=scope))
    assert explain(yard, request).pauses == []
    assert explain(yard, request).waits_for.startswith("intake normal holds 1 request,")


def test_a_request_on_the_lane_of_a_paused_worker_names_the_pause(yard: PlayedYard) -> None:
    request, worker = make_request(NAME), yard.worker("w")
    yard.assign(worker, request)
    order = Order(signal="PAUSE", scope="worker:w", mode="keep", by="kim@north", why="its driver")
    Signals(yard).give(order)

    timeline = explain(yard, request)

    assert [pause.scope for pause in timeline.pauses] == ["worker:w"]
    assert "worker w PAUSED" in texts(timeline)
    assert "by kim@north: its driver" in texts(timeline)


def test_a_waiting_plain_request_is_found(yard: PlayedYard) -> None:
    yard.worker("w")
    Signals(yard).give(Order(signal="PAUSE", why="its driver"))
    request = make_request(NAME, client="ann", model="adder")
    entry = yard.push(request_fields(request)).entry

    timeline = explain(yard, request)

    assert (timeline.state, timeline.server_id) == ("waiting", f"normal/{entry}")
    assert timeline.accepted_ms == int(entry.partition("-")[0])
    assert timeline.waits_for.endswith(": its driver")
    with pytest.raises(UnknownRequest):
        explain(yard, make_request(NAME, client="bob"))


def test_an_adapter_counts_as_a_served_model(yard: PlayedYard) -> None:
    yard.scripts.register("w", LONG_MS, worker_json("w", adapters=["french"]))
    request = make_request(NAME, model="french")
    yard.submit(request)
    assert explain(yard, request).waits_for.startswith("intake normal holds 1 request,")


def test_a_request_cancelled_before_arrival_has_no_attempts(yard: PlayedYard) -> None:
    yard.scripts.cancel("ann", NAME, "for a test")

    timeline = read_timeline(yard, "ann", NAME)

    assert (timeline.state, timeline.accepted_ms, timeline.attempts) == ("cancelled", None, [])
    assert texts(timeline) == "cancelled: 0 tokens, CANCELLED: for a test"


def test_a_refused_request_has_the_reason(yard: PlayedYard) -> None:
    request = make_request(NAME)
    yard.answer(yard.submit(request), Code.DEADLINE_EXCEEDED)

    timeline = explain(yard, request)

    assert timeline.ended_ms is not None
    assert "expired: 0 tokens, DEADLINE_EXCEEDED: the test says so" in texts(timeline)


def test_a_ledger_of_an_older_version_is_read(yard: PlayedYard) -> None:
    request = make_request(NAME)
    ledger = yard.keys.ledger(request.client, NAME)
    yard.connection.hset(ledger, mapping={"state": "assigned", "sid": "normal/5-0", "attempt": 2})

    timeline = explain(yard, request)

    assert (timeline.accepted_ms, timeline.attempts) == (5, [])
    assert texts(timeline).startswith("accepted as normal/5-0")


@pytest.mark.parametrize("odd", ["9" * 5000, "999999999", "-1", "x"])
def test_a_forged_ledger_is_read_without_error(yard: PlayedYard, odd: str) -> None:
    request = make_request(NAME)
    yard.assign(yard.worker(), request)
    fields = {
        "attempt": odd,
        "ended": odd,
        "r1": f"{odd} w",
        "refusals": odd,
        "refused": f"{odd} w {odd}",
        "trial": odd,
        "t" + odd: f"{odd}-1 w",
    }
    yard.connection.hset(yard.keys.ledger(request.client, request.id), mapping=fields)

    assert explain(yard, request).attempts
