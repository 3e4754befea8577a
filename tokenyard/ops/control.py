"""Gives control signals to a yard and waits for its workers to obey.

A signal changes the desired state of a scope (`tokenyard.protocol.control`), which workers follow
whenever they join. DRAIN and STOP leave no desired state: they are commands to the workers that are
in scope now. Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from tokenyard import clock
from tokenyard.protocol.control import (
    ALL,
    Acknowledgement,
    Command,
    DesiredState,
    DesiredStates,
    Invalid,
    Order,
    PauseMode,
    Signal,
    Trial,
    after,
    decode_desired,
    is_scope,
    model_scope,
    undo_reload,
    worker_scope,
)
from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import position, unix_ms
from tokenyard.protocol.worker_info import WorkerInfo
from tokenyard.scripts import Scripts
from tokenyard.yard.changes import read_acknowledgements
from tokenyard.yard.pauses import scopes_of, workers_in
from tokenyard.yard.snapshot import RosterView, read_roster

_VERBS: Final[Mapping[Signal, Literal["drain", "stop"]]] = {"DRAIN": "drain", "STOP": "stop"}
_POLL_S: Final = 0.1
#: Time beyond its time-out after which the leader ends an abandoned reload.
_GRACE_S: Final = 5.0
#: Tries of a change that loses the race against other operators.
_MAX_TRIES: Final = 100


#: The process of a worker, whatever its incarnation: the worker's name, host and pid.
ProcessIdentity = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class SignalReceipt:
    """A signal that was given, with the ids of its control entries.

    If nothing was to change, and no worker refuses anything, nothing was written and the id is that
    of the last change.
    """

    order: Order
    ids: tuple[str, ...] = ()
    is_redundant: bool = False
    workers: tuple[str, ...] = ()  # DRAIN, STOP: with incarnation, in the order of ``ids``
    #: Their processes, to recognize one that has a new incarnation meanwhile.
    processes: tuple[ProcessIdentity, ...] = ()


@dataclass(frozen=True, slots=True)
class Unacknowledged:
    """A worker that has not obeyed."""

    worker: str  # with its incarnation
    name: str  # without
    reason: str = ""  # why it refuses; "": it has not answered


def await_acknowledgements(
    yard: Yard,
    asked: Mapping[str, Unacknowledged],
    timeout_s: float,
    is_enough: Callable[[Iterable[object]], bool] = all,
) -> list[Unacknowledged]:
    """Wait for the answers to commands, by id; the workers that refuse, or have not answered.

    With ``is_enough=any`` the first refusal ends the wait.
    """

    def look() -> list[Unacknowledged]:
        answers = read_acknowledgements(yard, asked)
        return [
            replace(one, reason=_reason(answer))
            for entry, one in asked.items()
            if (answer := answers[entry].get(one.worker)) is None or not answer.done
        ]

    return _poll(look, timeout_s, is_enough)


def _poll(
    look: Callable[[], list[Unacknowledged]],
    timeout_s: float,
    is_enough: Callable[[Iterable[object]], bool],
) -> list[Unacknowledged]:
    """Look until nobody is left, those left refuse, or the time is over; who is left."""
    until = clock.monotonic() + timeout_s
    while (left := look()) and not is_enough(one.reason for one in left):
        if (rest_s := until - clock.monotonic()) <= 0:
            break
        clock.sleep(min(_POLL_S, rest_s))
    return left


class Signals:
    """The control signals of one yard."""

    def __init__(self, yard: Yard) -> None:
        self._yard = yard
        self._scripts = Scripts(yard)

    def desired_states(self) -> DesiredStates:
        """The desired states of all scopes."""
        return decode_desired(self._fields()[0])

    def give(self, order: Order) -> SignalReceipt:
        """Give a signal, whatever other operators do at the same time.

        Raises:
            control.Invalid: it is not allowed now, or an argument is missing.
        """
        if not is_scope(order.scope):
            raise Invalid(
                f"{order.signal}: scope {order.scope!r}: use {ALL}, {model_scope('<name>')} or "
                f"{worker_scope('<name>')}"
            )
        return self._command(order) if order.signal in _VERBS else self._change(order)

    def _change(self, order: Order) -> SignalReceipt:
        """Change the desired state of the order's scope; tries again if others change it."""
        for _ in range(_MAX_TRIES):
            fields, now_ms = self._fields()
            found = decode_desired(fields)
            desired_state = found.by_scope.get(order.scope, DesiredState())
            changed = after(desired_state, order, now_ms)
            if changed == desired_state and not self._is_refused(order, found.changed):
                return SignalReceipt(order, (found.changed,), is_redundant=True)
            seen = fields.get(order.scope.encode(), b"")
            if entry := self._scripts.signal(order, seen, changed):
                return SignalReceipt(order, (entry,))
        raise BrokerUnavailable(
            f"the desired state of {order.scope} was changed by others each time"
        )

    def _is_refused(self, order: Order, entry: str) -> bool:
        """Whether a worker refuses something; the same signal makes it try again.

        It has answered the last change and does not show it as obeyed: what it has acknowledged
        there may be another order.
        """
        live = _newest(read_roster(self._yard).live)
        answers = read_acknowledgements(self._yard, (entry,))[entry]
        return any(
            order.scope in scopes_of(info) and not _has_obeyed(info, (entry,))
            for worker, info in live.items()
            if worker in answers
        )

    def _command(self, order: Order) -> SignalReceipt:
        """Command the workers that are in scope now, each by its incarnation."""
        verb, ids, live = _VERBS[order.signal], [], read_roster(self._yard).live
        told = workers_in(live, order.scope)
        for worker in told:
            command = Command(verb=verb, worker=worker, why=order.why, by=order.by)
            ids.append(self._scripts.command(command))
        processes = tuple(_process(live[worker]) for worker in told)
        return SignalReceipt(order, tuple(ids), not told, tuple(told), processes)

    def unacknowledged(self, receipt: SignalReceipt) -> list[Unacknowledged]:
        """The workers that hold a lease and have not obeyed."""
        return self._missing(receipt, read_roster(self._yard).live)

    def behind(self, roster: RosterView) -> list[Unacknowledged]:
        """Those of the live workers that do not follow the last change of a desired state yet."""
        last = SignalReceipt(Order(signal="PAUSE"), (roster.desired_states.changed,))
        return self._missing(last, roster.live)

    def _missing(
        self, receipt: SignalReceipt, live: Mapping[str, WorkerInfo]
    ) -> list[Unacknowledged]:
        answers = dict[str, Acknowledgement]()
        for found in read_acknowledgements(self._yard, receipt.ids).values():
            answers |= found
        if receipt.order.signal in _VERBS:
            missing = [one for one, info in live.items() if _process(info) in receipt.processes]
        else:
            missing = [
                worker
                for worker, info in _newest(live).items()
                if receipt.order.scope in scopes_of(info) and not _has_obeyed(info, receipt.ids)
            ]
            missing = [one for one in missing if one not in answers or not answers[one].done]
        return [
            Unacknowledged(one, live[one].name, _reason(answers.get(one)))
            for one in sorted(missing)
        ]

    def wait(
        self,
        receipt: SignalReceipt,
        timeout_s: float,
        is_enough: Callable[[Iterable[object]], bool] = all,
    ) -> list[Unacknowledged]:
        """Wait until all have obeyed, or the rest refuses; the workers that have not obeyed.

        With ``is_enough=any`` the first refusal ends the wait.
        """
        return _poll(lambda: self.unacknowledged(receipt), timeout_s, is_enough)

    def reload(
        self, model: str, path: str, epoch: int, mode: PauseMode, timeout_s: float, by: str = ""
    ) -> list[Unacknowledged]:
        """Give a model new weights under a new epoch: pause, load, set the epoch, unpause.

        ``path`` is a checkpoint on the workers' hosts, "" for the model's own weights. The path
        identifies the content: weights that come from this path already are not read again. Each
        host that may load the model checks the path before anything is paused. If a worker refuses
        or does not obey in time, all return to the previous weights and epoch, and the workers that
        did not obey are returned. ``timeout_s`` limits the whole. If the caller dies, the leader
        reverts the reload after that time, or the same call continues it. ``by`` is the operator.

        Raises:
            control.Invalid: it is not allowed now, or no live host may load the model; nothing has
                changed.
        """
        until = clock.monotonic() + timeout_s
        scope = model_scope(model)
        orders = self._reload_orders(scope, path, epoch, mode, timeout_s, by)
        if path and (left := self._check(model, path, timeout_s)):
            return left
        try:
            for order in orders:
                rest_s = max(0.0, until - clock.monotonic())
                if left := self.wait(self.give(order), rest_s, is_enough=any):
                    self._revert(scope, until)
                    return left
        except KeyboardInterrupt:
            self._revert(scope, clock.monotonic())
            raise
        return []

    def end_trial(self, scope: str) -> SignalReceipt | None:
        """Revert a reload that is in progress; None if there is none."""
        for _ in range(_MAX_TRIES):
            seen = self._fields()[0].get(scope.encode(), b"")
            desired_state = decode_desired({scope.encode(): seen}).by_scope.get(
                scope, DesiredState()
            )
            if desired_state.trial is None:
                return None
            order, before = undo_reload(scope, desired_state, "the reload has failed")
            if entry := self._scripts.signal(order, seen, before):
                return SignalReceipt(order, (entry,))
        raise BrokerUnavailable(f"the desired state of {scope} was changed by others each time")

    def _revert(self, scope: str, until: float) -> None:
        """Revert a reload on all workers, and wait for them."""
        if receipt := self.end_trial(scope):
            self.wait(receipt, max(0.0, until - clock.monotonic()))

    def _check(self, model: str, path: str, timeout_s: float) -> list[Unacknowledged]:
        """A worker of each host that cannot read these weights, or does not answer."""
        asked = {}  # by the id of the command: a worker of each host
        for worker, info in self._one_worker_of_each_host(model):
            command = Command(
                verb="check", worker=worker, model=model, weights=path, why="a reload is asked for"
            )
            asked[self._scripts.command(command)] = Unacknowledged(worker, info.name)
        if not asked:
            raise Invalid(
                f"RELOAD_WEIGHTS: no live host may load {model}, so none can check "
                f"{path}: start one first"
            )
        return await_acknowledgements(self._yard, asked, timeout_s, is_enough=any)

    def _one_worker_of_each_host(self, model: str) -> list[tuple[str, WorkerInfo]]:
        """A worker of each live host that may load a model."""
        roster = read_roster(self._yard)
        hosts = {
            host.name for host in roster.hosts if any(one.name == model for one in host.models)
        }
        found = {
            info.controller: (worker, info)
            for worker, info in sorted(roster.live.items())
            if info.controller in hosts
        }
        return list(found.values())

    def _reload_orders(
        self, scope: str, path: str, epoch: int, mode: PauseMode, timeout_s: float, by: str
    ) -> Sequence[Order]:
        """The steps of a reload; raises `Invalid` for what a later step would refuse.

        A paused scope is not paused again. Once all workers have the weights, they keep them even
        if the caller dies.
        """
        fields, now_ms = self._fields()
        desired_state = begun = decode_desired(fields).by_scope.get(scope, DesiredState())
        trial = Trial(
            until_ms=now_ms + int(1000 * (timeout_s + _GRACE_S)),
            weights=begun.trial.weights if begun.trial else begun.weights,
            run_state=begun.trial.run_state if begun.trial else begun.run_state,
        )
        done = Trial(until_ms=trial.until_ms, weights=path)
        order_of = partial(Order, scope=scope, why="reload", by=by)
        orders = (
            order_of(signal="PAUSE", mode=mode, trial=trial),
            order_of(signal="RELOAD_WEIGHTS", weights=path, trial=trial),
            order_of(signal="SET_GENERATION_EPOCH", epoch=epoch, trial=done),
            order_of(signal="UNPAUSE"),
        )
        for order in orders:
            desired_state = after(desired_state, order)
        if begun.run_state != "RUNNING":
            return orders[1:]
        if path and path == begun.weights and epoch != begun.epoch:
            raise Invalid(
                f"RELOAD_WEIGHTS: {scope} has the weights at {path} already: "
                "give each checkpoint a path of its own"
            )
        return orders

    def _fields(self) -> tuple[dict[bytes, bytes], int]:
        """The hash `desired`, and unix ms by the server's clock."""
        pipeline = self._yard.connection.pipeline(transaction=False)
        pipeline.hgetall(self._yard.keys.desired)
        pipeline.time()
        fields, now = pipeline.execute()
        return dict(fields), unix_ms(now)


def _process(info: WorkerInfo) -> ProcessIdentity:
    return info.name, info.host, info.pid


def _newest(live: Mapping[str, WorkerInfo]) -> dict[str, WorkerInfo]:
    """The newest incarnation of each worker."""
    by_name: dict[str, str] = {}
    for worker in sorted(live, key=_incarnation):
        by_name[live[worker].name] = worker
    return {worker: live[worker] for worker in by_name.values()}


def _incarnation(worker: str) -> int:
    number = worker.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


def _has_obeyed(info: WorkerInfo, ids: tuple[str, ...]) -> bool:
    """Whether it has obeyed these entries; a failed worker has nothing to do."""
    return info.state == "failed" or all(position(info.obeyed) >= position(one) for one in ids)


def _reason(answer: Acknowledgement | None) -> str:
    if answer is None or answer.done:
        return ""
    return answer.reason or "it refused without a reason"
