"""Who has yet to obey a signal, and how long an operator waits."""

from __future__ import annotations

import threading

from tests.integration.played_host import ADDER, BOUND_S, PAUSE, PlayedHost, names
from tests.support.fake_clock import FakeClock
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard.ops.control import Signals, Unacknowledged
from tokenyard.protocol.control import ALL, Order, model_scope, worker_scope
from tokenyard.scripts import Scripts


def test_each_worker_in_scope_has_to_obey(signals: Signals, host: PlayedHost) -> None:
    # Given workers of two models, and one without any
    adder, other, warm = (
        host.join("a"),
        host.join("b", model="other"),
        host.join("c", state="warm", model=""),
    )
    by_scope = {
        ALL: {adder, other, warm},
        ADDER: {adder},
        worker_scope("c"): {warm},
        model_scope("nobody"): set(),
    }
    for scope, expected in by_scope.items():
        # If a scope is paused, I expect that its workers are named, and no others,
        given = signals.give(Order(signal="PAUSE", scope=scope))
        assert set(names(signals.unacknowledged(given))) == expected
        # until they obey.
        for worker in expected:
            host.obey(worker, given)
        assert signals.unacknowledged(given) == []


def test_later_acknowledgement_covers_an_earlier_signal(signals: Signals, host: PlayedHost) -> None:
    # Given that ids of entries are no decimal numbers
    worker = host.join("w")
    given = signals.give(PAUSE)
    ms, _, count = given.ids[0].partition("-")
    for obeyed, holds_out in [
        ("", True),
        ("nonsense", True),
        ("9-9", True),
        (f"{int(ms) - 1}-99", True),
        (f"{ms}-{count}", False),
        (f"{ms}-{int(count) + 10}", False),
        (f"{int(ms) * 10}-0", False),
    ]:
        host.show(worker, obeyed=obeyed)
        assert bool(signals.unacknowledged(given)) is holds_out, obeyed


def test_an_acknowledgement_counts_too(signals: Signals, host: PlayedHost) -> None:
    worker, mute = host.join("a"), host.join("b")
    given = signals.give(PAUSE)
    host.answer(worker, given.ids[0])

    assert signals.unacknowledged(given) == [Unacknowledged(mute, "b")]


def test_refusing_worker_is_named_with_its_reason(signals: Signals, host: PlayedHost) -> None:
    # Given two workers that cannot, one of which does not say why
    first, second = host.join("a"), host.join("b")
    given = signals.give(PAUSE)
    host.answer(first, given.ids[0], "this engine cannot sleep")
    host.answer(second, given.ids[0], " ")

    # I expect that to wait for them has an end.
    assert signals.wait(given, BOUND_S) == [
        Unacknowledged(first, "a", "this engine cannot sleep"),
        Unacknowledged(second, "b", " "),
    ]


def test_wait_continues_for_others_after_a_refusal(
    signals: Signals, host: PlayedHost, fake_clock: FakeClock
) -> None:
    refusing, slow = host.join("a"), host.join("b")
    given = signals.give(PAUSE)
    host.answer(refusing, given.ids[0], "no")

    began = fake_clock.now
    assert names(signals.wait(given, BOUND_S)) == [refusing, slow]
    assert fake_clock.now >= began + BOUND_S
    host.obey(slow, given)
    assert names(signals.wait(given, BOUND_S)) == [refusing]


def test_worker_that_obeys_after_a_refusal_counts(signals: Signals, host: PlayedHost) -> None:
    worker = host.join("a")
    given = signals.give(PAUSE)
    host.answer(worker, given.ids[0], "not yet")
    host.obey(worker, given)

    assert signals.wait(given, BOUND_S) == []


def test_repeated_signal_reaches_workers_that_refused(signals: Signals, host: PlayedHost) -> None:
    # Given a worker that could not obey, for a reason that is gone by now
    worker = host.join("a")
    first = signals.give(PAUSE)
    host.answer(worker, first.ids[0], "no room on the disk")

    # If it is ordered once more, I expect another signal, which it has yet to answer,
    again = signals.give(PAUSE)
    assert not again.is_redundant
    assert signals.desired_states().changed == again.ids[0] != first.ids[0]
    assert signals.unacknowledged(again) == [Unacknowledged(worker, "a")]
    # and silence where it has obeyed.
    host.obey(worker, again)
    assert signals.give(PAUSE).is_redundant


def test_answers_that_cannot_be_read_are_none(
    signals: Signals, host: PlayedHost, yard: PlayedYard
) -> None:
    worker = host.join("a")
    given = signals.give(PAUSE)
    yard.connection.hset(yard.keys.acks(given.ids[0]), mapping={worker: b"{", b"\xff": b"{}"})

    assert signals.unacknowledged(given) == [Unacknowledged(worker, "a")]


def test_the_wait_ends_when_all_have_obeyed(signals: Signals, host: PlayedHost) -> None:
    workers = [host.join(name) for name in "abcd"]
    given = signals.give(PAUSE)
    found: list[list[Unacknowledged]] = []
    waiting = threading.Thread(target=lambda: found.append(signals.wait(given, BOUND_S)))
    waiting.start()
    for worker in workers:
        assert waiting.is_alive()
        host.obey(worker, given)
    waiting.join(timeout=BOUND_S)

    assert found == [[]]


def test_a_dead_worker_is_named_until_its_lease_is_over(
    signals: Signals, host: PlayedHost, yard: PlayedYard
) -> None:
    # Given a worker that has died without anybody seeing it
    dead = host.join("a")
    given = signals.give(PAUSE)
    assert names(signals.wait(given, 0.0)) == [dead]

    # If its lease runs out, I expect that nobody waits for it any longer.
    yard.connection.zadd(yard.keys.leases, {dead: 1})
    assert signals.wait(given, BOUND_S) == []


def test_a_dead_worker_is_named_until_its_successor_obeys(
    signals: Signals, host: PlayedHost
) -> None:
    # Given ten incarnations, so that their numbers do not sort as text, and leases that all run
    given = signals.give(PAUSE)
    for _ in range(10):
        latest = host.join("a")
        # I expect that it is always the latest who has to obey.
        assert signals.unacknowledged(given) == [Unacknowledged(latest, "a")]
    host.obey(latest, given)
    assert signals.unacknowledged(given) == []


def test_failed_left_and_unreadable_workers_are_not_waited_for(
    signals: Signals, host: PlayedHost, scripts: Scripts
) -> None:
    host.join("a", state="failed")
    host.leave(host.join("b"))
    scripts.register("c", LONG_MS, b"{")
    given = signals.give(PAUSE)

    assert signals.wait(given, BOUND_S) == []
