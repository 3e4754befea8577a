"""`Signals`: what an operator gives, to whom it goes, and who has yet to obey.

No controller runs here: the tests write what one would write to the roster, so that every answer
comes when the test wants it.
"""

from __future__ import annotations

import threading
from typing import Any, Self

import msgspec
import pytest
import redis

from tests.support.builders import make_worker_info
from tests.support.waiting import eventually
from tests.support.yard import LONG_MS
from tokenyard.admin.signals import SignalReceipt, Signals, Unacknowledged
from tokenyard.protocol.commands import Acknowledgement, Command, parse_command
from tokenyard.protocol.control import (
    ALL,
    DesiredState,
    Invalid,
    Order,
    encode_desired,
    model_scope,
    parse_order,
    worker_scope,
)
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, WorkerInfo, encode_worker
from tokenyard.scripts import Renewed, Scripts

ADDER = model_scope("adder")
PAUSE = Order(signal="PAUSE")
SOON_S = 0.3
BOUND_S = 30.0


class Host:
    """Workers that do what the test says, as the roster shows it."""

    def __init__(self, scripts: Scripts, connection: redis.Redis, keys: Keys) -> None:
        self._scripts = scripts
        self._connection, self._keys = connection, keys
        self._infos: dict[str, WorkerInfo] = {}

    def join(self, name: str, lease_ms: int = LONG_MS, **fields: object) -> str:
        info = make_worker_info(name, **fields)
        worker = self._scripts.register(name, lease_ms, encode_worker(info))
        self._infos[worker] = info
        return worker

    def show(self, worker: str, **fields: object) -> None:
        values = {name: getattr(self._infos[worker], name) for name in WorkerInfo.__struct_fields__}
        self._infos[worker] = info = WorkerInfo(**(values | fields))
        assert self._scripts.renew(LONG_MS, [(worker, encode_worker(info))]) == [Renewed.HELD]

    def obey(self, worker: str, given: SignalReceipt) -> None:
        self.show(worker, obeyed=given.ids[-1])

    def answer(self, worker: str, entry: str, reason: str = "") -> None:
        what = Acknowledgement(worker=worker, done=not reason, reason=reason)
        self._scripts.acknowledge(entry, what)

    def offer(self, controller: str, model: str) -> None:
        info = HostInfo(name=controller, models=[ModelInfo(name=model)])
        self._scripts.publish_host(info)

    def commands(self, behind: str) -> list[tuple[str, Command]]:
        start = "-" if behind == "-" else f"({behind}"
        found: Any = self._connection.xrange(self._keys.control, min=start)
        read = [(entry.decode(), parse_command(fields)) for entry, fields in found]
        return [(entry, command) for entry, command in read if command]

    def leave(self, worker: str) -> None:
        self._scripts.retire(worker, "left", "the test says so")


@pytest.fixture
def host(scripts: Scripts, connection: redis.Redis, keys: Keys) -> Host:
    return Host(scripts, connection, keys)


@pytest.fixture
def signals(connection: redis.Redis, keys: Keys) -> Signals:
    return Signals(connection, keys)


def names(unacknowledged: list[Unacknowledged]) -> list[str]:
    return [one.worker for one in unacknowledged]


def entries(connection: redis.Redis, keys: Keys) -> int:
    return int(connection.xlen(keys.control))


def ordered(signals: Signals) -> dict[str, DesiredState]:
    """The desired states without who ordered them, when and why."""
    return {
        scope: msgspec.structs.replace(desired_state, by="", why="", since_ms=0)
        for scope, desired_state in signals.desired_states().by_scope.items()
    }


# Giving


def test_a_pause_says_who_ordered_it_when_and_why(
    signals: Signals, connection: redis.Redis
) -> None:
    before_ms = connection.time()[0] * 1000
    signals.give(Order(signal="PAUSE", scope=ADDER, by="kim@north", why="its driver"))
    paused = signals.desired_states().by_scope[ADDER]
    assert (paused.by, paused.why) == ("kim@north", "its driver")
    assert before_ms <= paused.since_ms <= before_ms + 60_000

    # If another pauses it again, I expect that it stays the pause of the first.
    signals.give(Order(signal="PAUSE", scope=ADDER, by="lee@south", why="no reason"))
    assert signals.desired_states().by_scope[ADDER] == paused

    # A suspend is its own order; without a reason it has that of the pause.
    signals.give(Order(signal="SUSPEND", scope=ADDER, by="lee@south"))
    suspended = signals.desired_states().by_scope[ADDER]
    assert (suspended.by, suspended.why) == ("lee@south", "its driver")
    signals.give(Order(signal="RESUME", scope=ADDER))
    signals.give(Order(signal="UNPAUSE", scope=ADDER, by="kim@north", why="mended"))
    assert signals.desired_states().by_scope == {}


def test_a_reload_says_whose_it_is(
    signals: Signals, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a reload that is under way
    def look(*_: object, **__: object) -> list[Unacknowledged]:
        seen.append(signals.desired_states().by_scope[ADDER])
        return []

    seen: list[DesiredState] = []
    host.join("w")
    monkeypatch.setattr(signals, "wait", look)
    assert signals.reload("adder", "", 1, "abort", SOON_S, by="kim@north") == []

    # I expect that whoever looks sees whose it is, until all run again.
    *held, over = seen
    assert [(one.by, one.why) for one in held] == [("kim@north", "reload")] * 3
    assert (over.run_state, over.by, over.why) == ("RUNNING", "", "")


def test_signal_sets_the_desired_state(
    signals: Signals, connection: redis.Redis, keys: Keys
) -> None:
    # Given a yard without signals, if the model is paused,
    order = Order(signal="PAUSE", scope=ADDER, mode="keep", why="night")
    given = signals.give(order)

    # I expect the desired state of its scope, and the order for the controllers.
    assert ordered(signals) == {ADDER: DesiredState(run_state="PAUSED", mode="keep")}
    assert given == SignalReceipt(order, (signals.desired_states().changed,))
    [(entry, fields)] = connection.xrange(keys.control)
    assert (entry.decode(), parse_order(fields)) == (given.ids[0], order)


def test_a_redundant_signal_writes_nothing_and_can_be_waited_for(
    signals: Signals, connection: redis.Redis, keys: Keys, host: Host
) -> None:
    # Given a paused yard with a worker that has not obeyed yet
    first = signals.give(PAUSE)
    worker = host.join("w")
    events = connection.xlen(keys.events)

    # If it is paused again,
    again = signals.give(replace_order(PAUSE, mode="wait"))

    # I expect nothing new but the id of the last change to wait for.
    assert (again.is_redundant, again.ids) == (True, first.ids)
    assert entries(connection, keys) == 1
    assert connection.xlen(keys.events) == events
    assert signals.desired_states().by_scope[ALL].mode == "abort"
    assert names(signals.unacknowledged(again)) == [worker]
    host.obey(worker, first)
    assert signals.unacknowledged(again) == []


def replace_order(order: Order, **fields: object) -> Order:
    values = {name: getattr(order, name) for name in Order.__struct_fields__}
    return Order(**(values | fields))


def test_no_unacknowledged_workers_without_signals(
    signals: Signals, connection: redis.Redis, keys: Keys, host: Host
) -> None:
    host.join("w")
    given = signals.give(Order(signal="UNPAUSE"))

    assert given.is_redundant
    assert signals.wait(given, BOUND_S) == []
    assert not connection.exists(keys.desired, keys.control)


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        (Order(signal="SUSPEND"), "all is RUNNING: PAUSE it first"),
        (Order(signal="SET_GENERATION_EPOCH"), "give the epoch"),
        (Order(signal="PAUSE", scope="adder"), "use all, model:<name> or worker:<name>"),
        (Order(signal="DRAIN", scope="worker:"), "use all, model:<name> or worker:<name>"),
        (Order(signal="RELOAD_WEIGHTS", scope=ALL, weights="/x"), "all is RUNNING"),
    ],
)
def test_invalid_signal_changes_nothing(
    signals: Signals, connection: redis.Redis, keys: Keys, order: Order, hint: str
) -> None:
    with pytest.raises(Invalid, match=hint):
        signals.give(order)

    assert not connection.exists(keys.desired, keys.control, keys.events)


def test_unreadable_desired_state_is_overwritten(
    signals: Signals, connection: redis.Redis, keys: Keys
) -> None:
    # Given nonsense where the desired state should be, which all take for the first desired state
    for nonsense in (b"{", b"\xff", b'{"run_state":"DANCING"}'):
        connection.hset(keys.desired, ALL, nonsense)
        with pytest.raises(Invalid):
            signals.give(Order(signal="SUSPEND"))

        # I expect that a pause puts that right.
        assert not signals.give(PAUSE).is_redundant
        assert ordered(signals) == {ALL: DesiredState(run_state="PAUSED")}


def test_desired_state_of_another_version_keeps_unknown_fields(
    signals: Signals, connection: redis.Redis, keys: Keys
) -> None:
    connection.hset(keys.desired, ALL, b'{"run_state":"PAUSED","epoch":4,"tempo":"allegro"}')

    assert signals.give(PAUSE).is_redundant
    assert not signals.give(Order(signal="SUSPEND")).is_redundant
    assert ordered(signals) == {ALL: DesiredState(run_state="SUSPENDED", epoch=4)}


def test_of_two_operators_who_pause_at_once_one_is_redundant(
    connection: redis.Redis, keys: Keys, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given somebody who pauses between this operator's look and change
    def interrupted(self: Scripts, order: Order, seen: bytes, now: DesiredState) -> str | None:
        monkeypatch.undo()
        Signals(connection, keys).give(PAUSE)
        return self.signal(order, seen, now)

    monkeypatch.setattr(Scripts, "signal", interrupted)
    given = signals.give(Order(signal="PAUSE", mode="wait"))

    # I expect that this one finds it done.
    assert given.is_redundant
    assert given.ids == (signals.desired_states().changed,)
    assert entries(connection, keys) == 1


def test_signal_that_became_invalid_is_refused(
    connection: redis.Redis, keys: Keys, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals.give(PAUSE)

    def interrupted(self: Scripts, order: Order, seen: bytes, now: DesiredState) -> str | None:
        monkeypatch.undo()
        Signals(connection, keys).give(Order(signal="UNPAUSE"))
        return self.signal(order, seen, now)

    monkeypatch.setattr(Scripts, "signal", interrupted)
    with pytest.raises(Invalid, match="all is RUNNING: PAUSE it first"):
        signals.give(Order(signal="SUSPEND"))


def test_signal_gives_up_after_many_lost_races(
    signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripts, "signal", lambda *_: None)

    with pytest.raises(BrokerUnavailable, match="the desired state of all was changed by others"):
        signals.give(PAUSE)


# Who has yet to obey


def test_each_worker_in_scope_has_to_obey(signals: Signals, host: Host) -> None:
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


def test_later_acknowledgement_covers_an_earlier_signal(signals: Signals, host: Host) -> None:
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


def test_an_acknowledgement_counts_too(signals: Signals, host: Host) -> None:
    worker, mute = host.join("a"), host.join("b")
    given = signals.give(PAUSE)
    host.answer(worker, given.ids[0])

    assert signals.unacknowledged(given) == [Unacknowledged(mute, "b")]


def test_refusing_worker_is_named_with_its_reason(signals: Signals, host: Host) -> None:
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


def test_wait_continues_for_others_after_a_refusal(signals: Signals, host: Host) -> None:
    refusing, slow = host.join("a"), host.join("b")
    given = signals.give(PAUSE)
    host.answer(refusing, given.ids[0], "no")

    assert names(signals.wait(given, SOON_S)) == [refusing, slow]
    host.obey(slow, given)
    assert names(signals.wait(given, BOUND_S)) == [refusing]


def test_worker_that_obeys_after_a_refusal_counts(signals: Signals, host: Host) -> None:
    worker = host.join("a")
    given = signals.give(PAUSE)
    host.answer(worker, given.ids[0], "not yet")
    host.obey(worker, given)

    assert signals.wait(given, BOUND_S) == []


def test_repeated_signal_reaches_workers_that_refused(signals: Signals, host: Host) -> None:
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
    signals: Signals, host: Host, connection: redis.Redis, keys: Keys
) -> None:
    worker = host.join("a")
    given = signals.give(PAUSE)
    connection.hset(keys.acks(given.ids[0]), mapping={worker: b"{", b"\xff": b"{}"})

    assert signals.unacknowledged(given) == [Unacknowledged(worker, "a")]


def test_the_wait_ends_when_all_have_obeyed(signals: Signals, host: Host) -> None:
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
    signals: Signals, host: Host, connection: redis.Redis, keys: Keys
) -> None:
    # Given a worker that has died without anybody seeing it
    dead = host.join("a")
    given = signals.give(PAUSE)
    assert names(signals.wait(given, 0.0)) == [dead]

    # If its lease runs out, I expect that nobody waits for it any longer.
    connection.zadd(keys.leases, {dead: 1})
    assert signals.wait(given, BOUND_S) == []


def test_a_dead_worker_is_named_until_its_successor_obeys(signals: Signals, host: Host) -> None:
    # Given ten incarnations, so that their numbers do not sort as text, and leases that all run
    given = signals.give(PAUSE)
    for _ in range(10):
        latest = host.join("a")
        # I expect that it is always the latest who has to obey.
        assert signals.unacknowledged(given) == [Unacknowledged(latest, "a")]
    host.obey(latest, given)
    assert signals.unacknowledged(given) == []


def test_failed_left_and_unreadable_workers_are_not_waited_for(
    signals: Signals, host: Host, scripts: Scripts
) -> None:
    host.join("a", state="failed")
    host.leave(host.join("b"))
    scripts.register("c", LONG_MS, b"{")
    given = signals.give(PAUSE)

    assert signals.wait(given, BOUND_S) == []


# DRAIN and STOP


@pytest.mark.parametrize(("signal", "verb"), [("DRAIN", "drain"), ("STOP", "stop")])
def test_workers_are_commanded_to_go(
    signals: Signals, host: Host, connection: redis.Redis, keys: Keys, signal: str, verb: str
) -> None:
    # Given two workers of a model, one of another, and one whose lease is over
    first, second = host.join("a", pid=1), host.join("b", pid=2)
    host.join("c", model="other")
    connection.zadd(keys.leases, {host.join("d"): 1})

    # If the model's are to go,
    order = replace_order(Order(signal="DRAIN", scope=ADDER, why="new host"), signal=signal)
    given = signals.give(order)

    # I expect a command for each of the two, and no desired state;
    assert given.workers == (first, second)
    sent = [
        (entry.decode(), parse_command(fields)) for entry, fields in connection.xrange(keys.control)
    ]
    assert sent == [
        (entry, Command(verb=verb, worker=worker, why="new host"))  # type: ignore[arg-type]
        for entry, worker in zip(given.ids, given.workers, strict=True)
    ]
    assert ordered(signals) == {}
    # that they are waited for until they have left, whatever they answer,
    host.answer(first, given.ids[0])
    host.show(second, state="draining")
    assert names(signals.unacknowledged(given)) == [first, second]
    host.leave(first)
    assert names(signals.wait(given, SOON_S)) == [second]
    # and that successors are not meant.
    host.join("b", pid=3)
    host.leave(second)
    assert signals.wait(given, BOUND_S) == []


def test_drain_covers_later_incarnations_of_a_process(signals: Signals, host: Host) -> None:
    # Given a worker that is told to go at the moment in which it leaves and joins again
    before = host.join("a", host="h", pid=5)
    given = signals.give(Order(signal="DRAIN"))
    latest = host.join("a", host="h", pid=5)
    host.leave(before)

    # I expect it to be waited for until its process is gone.
    assert signals.wait(given, 0.0) == [Unacknowledged(latest, "a")]
    host.leave(latest)
    assert signals.wait(given, BOUND_S) == []


def test_worker_that_refuses_to_end_is_named_with_its_reason(signals: Signals, host: Host) -> None:
    worker = host.join("a")
    given = signals.give(Order(signal="DRAIN", scope=worker_scope("a")))
    host.answer(worker, given.ids[0], "no such verb")

    assert signals.wait(given, BOUND_S) == [Unacknowledged(worker, "a", "no such verb")]


@pytest.mark.parametrize("signal", ["DRAIN", "STOP"])
def test_signal_without_live_workers(
    signals: Signals, connection: redis.Redis, keys: Keys, signal: str
) -> None:
    order = replace_order(Order(signal="DRAIN", scope=worker_scope("ghost")), signal=signal)
    given = signals.give(order)

    assert given == SignalReceipt(order, is_redundant=True)
    assert signals.wait(given, BOUND_S) == []
    assert not connection.exists(keys.control)


# New weights


class Obedient:
    """A worker that obeys everything as soon as it is given, or refuses it."""

    def __init__(
        self,
        signals: Signals,
        host: Host,
        refuses: str = "",
        *,
        name: str = "w",
        cannot_see: str = "",
    ) -> None:
        """It refuses weights, or ``cannot_see`` them already when its host is asked to look."""
        self.seen: list[DesiredState] = []
        self._signals, self._host, self._refuses = signals, host, refuses
        self._cannot_see = cannot_see
        self._name = name
        self.worker = host.join(name, controller=name)
        host.offer(name, "adder")
        self._obeyed = signals.desired_states().changed
        self._heard = "-"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=BOUND_S)

    def _run(self) -> None:
        while not self._over.wait(0.005):
            desired_states = self._signals.desired_states()
            if desired_states.changed != self._obeyed:
                self._obeyed = desired_states.changed
                self._do(desired_states.of(self._name, "adder"))
            self._check()

    def _check(self) -> None:
        for entry, command in self._host.commands(self._heard):
            self._heard = entry
            if command.verb == "check" and command.worker == self.worker:
                is_seen = command.weights != self._cannot_see
                self._host.answer(self.worker, entry, "" if is_seen else "no such folder")

    def _do(self, desired_state: DesiredState) -> None:
        self.seen.append(desired_state)
        if self._refuses and desired_state.weights == self._refuses:
            self._host.answer(self.worker, self._obeyed, "no such folder")
        else:
            self._host.show(self.worker, obeyed=self._obeyed)


def test_new_weights_are_one_call(signals: Signals, host: Host) -> None:
    with Obedient(signals, host) as worker:
        left = signals.reload("adder", "/step-2", 2, "wait", BOUND_S)

    # I expect the worker to have been through all steps, one after the other.
    assert left == []
    assert worker.seen == [
        DesiredState(run_state="PAUSED", mode="wait"),
        DesiredState(run_state="PAUSED", mode="wait", weights="/step-2"),
        DesiredState(run_state="PAUSED", mode="wait", weights="/step-2", epoch=2),
        DesiredState(weights="/step-2", epoch=2),
    ]
    assert ordered(signals) == {ADDER: DesiredState(weights="/step-2", epoch=2)}


def test_weights_that_one_worker_refuses_come_to_nobody(signals: Signals, host: Host) -> None:
    # Given two workers of which one cannot load what it should, though its host could see it
    with (
        Obedient(signals, host) as other,
        Obedient(signals, host, refuses="/bad", name="v") as worker,
    ):
        assert signals.reload("adder", "/step-1", 1, "abort", BOUND_S) == []
        begun = len(other.seen)
        left = signals.reload("adder", "/bad", 2, "abort", BOUND_S)

        # I expect to be told, and both to run with the weights before, in the epoch before
        # (the other may not have answered yet: the first refusal ends the wait),
        refusals = [one for one in left if one.reason]
        assert refusals == [Unacknowledged(worker.worker, "v", "no such folder")]
        assert ordered(signals) == {ADDER: DesiredState(weights="/step-1", epoch=1)}
        eventually(lambda: other.seen[-1] == DesiredState(weights="/step-1", epoch=1))
        assert DesiredState(run_state="PAUSED", weights="/bad", epoch=1) in other.seen[begun:]
        # also when it is asked once more, and others to be taken all the same.
        assert worker.worker in names(signals.reload("adder", "/bad", 2, "abort", BOUND_S))
        assert signals.reload("adder", "/good", 2, "abort", BOUND_S) == []
    assert ordered(signals) == {ADDER: DesiredState(weights="/good", epoch=2)}


def test_weights_that_a_host_cannot_see_pause_nobody(signals: Signals, host: Host) -> None:
    # Given a host that may load the model, and holds nothing yet
    with (
        Obedient(signals, host) as other,
        Obedient(signals, host, name="v", cannot_see="/nope") as worker,
    ):
        host.show(worker.worker, state="warm", model="")

        left = signals.reload("adder", "/nope", 2, "abort", BOUND_S)

    assert left == [Unacknowledged(worker.worker, "v", "no such folder")]
    assert (other.seen, worker.seen) == ([], [])
    assert ordered(signals) == {}


def test_a_host_that_does_not_answer_pauses_nobody(signals: Signals, host: Host) -> None:
    worker = host.join("w", controller="w")
    host.offer("w", "adder")

    assert signals.reload("adder", "/step-2", 2, "abort", SOON_S) == [Unacknowledged(worker, "w")]
    assert ordered(signals) == {}


def test_reload_without_a_live_host_is_invalid(signals: Signals, host: Host) -> None:
    host.join("w", controller="w")
    host.offer("w", "subtractor")
    host.offer("gone", "adder")  # its last worker has gone

    with pytest.raises(Invalid, match="no live host may load adder"):
        signals.reload("adder", "/step-2", 2, "abort", BOUND_S)
    assert ordered(signals) == {}


def test_reload_reverts_if_a_worker_does_not_pause_in_time(signals: Signals, host: Host) -> None:
    worker = host.join("w", controller="w")

    assert names(signals.reload("adder", "", 2, "abort", SOON_S)) == [worker]
    assert ordered(signals) == {}


def test_failed_reload_keeps_an_earlier_pause(signals: Signals, host: Host) -> None:
    with Obedient(signals, host, refuses="/bad"):
        signals.give(Order(signal="PAUSE", scope=ADDER, mode="wait"))

        assert signals.reload("adder", "/bad", 2, "abort", BOUND_S)

    assert ordered(signals) == {ADDER: DesiredState(run_state="PAUSED", mode="wait")}


def test_an_interrupted_reload_goes_back(
    signals: Signals, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that is still loading when somebody presses Ctrl-C
    def interrupt(*_: object, **__: object) -> list[Unacknowledged]:
        if signals.desired_states().of("w", "adder").weights == "/step-2":
            raise KeyboardInterrupt
        return []

    with Obedient(signals, host):
        monkeypatch.setattr(signals, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            signals.reload("adder", "/step-2", 2, "abort", BOUND_S)

    assert ordered(signals) == {}


class Died(BaseException):
    """Takes the place of SIGKILL."""


@pytest.mark.parametrize(
    ("step", "left_behind"),
    [
        (1, DesiredState(run_state="PAUSED")),
        (2, DesiredState(run_state="PAUSED", weights="/step-2")),
        (3, DesiredState(run_state="PAUSED", weights="/step-2", epoch=2)),
    ],
)
def test_a_reload_whose_caller_was_killed_can_be_ended_or_done(
    signals: Signals,
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    left_behind: DesiredState,
) -> None:
    # Given a caller that has died after so many steps
    def die(given: SignalReceipt, *_: object, **__: object) -> list[Unacknowledged]:
        waited.append(given)
        if len(waited) == step:
            raise Died
        return []

    waited: list[SignalReceipt] = []
    with Obedient(signals, host):
        with monkeypatch.context() as patched:
            patched.setattr(signals, "wait", die)
            with pytest.raises(Died):
                signals.reload("adder", "/step-2", 2, "abort", BOUND_S)
        found = ordered(signals)[ADDER]
        assert msgspec.structs.replace(found, trial=None) == left_behind
        assert found.trial

        # I expect its end to bring back what was; or what is, once everybody has it;
        signals.end_trial(ADDER, "the test says so")
        kept = {ADDER: DesiredState(weights="/step-2", epoch=2)} if step == 3 else {}
        assert ordered(signals) == kept
        assert signals.end_trial(ADDER, "the test says so") is None

        # and the same call to do it all.
        assert signals.reload("adder", "/step-2", 2, "abort", BOUND_S) == []
    assert ordered(signals) == {ADDER: DesiredState(weights="/step-2", epoch=2)}


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_reload_that_was_cut_off_goes_on(signals: Signals, host: Host, done: int) -> None:
    # Given a reload whose caller died after so many of its steps
    orders = [
        Order(signal="PAUSE", scope=ADDER),
        Order(signal="RELOAD_WEIGHTS", scope=ADDER, weights="/step-2"),
        Order(signal="SET_GENERATION_EPOCH", scope=ADDER, epoch=2),
    ]
    with Obedient(signals, host) as worker:
        for order in orders[:done]:
            assert signals.wait(signals.give(order), BOUND_S) == []

        # I expect that the next one does the rest, and pauses nothing twice.
        assert signals.reload("adder", "/step-2", 2, "abort", BOUND_S) == []
    paused, *others = worker.seen
    assert paused == DesiredState(run_state="PAUSED")
    assert paused not in others
    assert ordered(signals) == {ADDER: DesiredState(weights="/step-2", epoch=2)}


@pytest.mark.parametrize(
    ("begin", "epoch", "hint"),
    [
        (DesiredState(run_state="SUSPENDED"), 2, "is SUSPENDED: PAUSE it first"),
        (DesiredState(), -1, "give the epoch"),
        (DesiredState(weights="/step-2", epoch=1), 2, "a path of its own"),
    ],
)
def test_a_reload_that_cannot_succeed_does_not_begin(
    signals: Signals,
    connection: redis.Redis,
    keys: Keys,
    begin: DesiredState,
    epoch: int,
    hint: str,
) -> None:
    packed = encode_desired(begin)
    if packed:
        connection.hset(keys.desired, ADDER, packed)
    with pytest.raises(Invalid, match=hint):
        signals.reload("adder", "/step-2", epoch, "abort", BOUND_S)

    assert connection.hget(keys.desired, ADDER) == (packed or None)
    assert not connection.exists(keys.control)


def test_a_reload_that_is_done_already_changes_nothing_in_the_end(
    signals: Signals, host: Host
) -> None:
    with Obedient(signals, host):
        for _ in range(2):
            assert signals.reload("adder", "/step-2", 2, "abort", BOUND_S) == []
    assert ordered(signals) == {ADDER: DesiredState(weights="/step-2", epoch=2)}


# All of them
