"""Giving control signals to a yard, and seeing who obeys.

A signal changes the desired state of a scope (`tokenyard.protocol.control`); the workers bring
themselves in accord with it, whenever they join. DRAIN and STOP leave no desired state: they are
commands to the workers that are in scope now. Errors of redis-py pass, for
`tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import msgspec
import redis

from tokenyard.protocol.commands import Acknowledgement, Command, decode_acknowledgement
from tokenyard.protocol.control import (
    ALL,
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
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.streams import position
from tokenyard.protocol.worker_info import HostInfo, WorkerInfo, decode_host, decode_worker
from tokenyard.scripts import Scripts

_VERBS: Final[Mapping[Signal, Literal["drain", "stop"]]] = {"DRAIN": "drain", "STOP": "stop"}
_POLL_S: Final = 0.1
#: What a reload that nobody ends has beyond its own time-out before the leader ends it.
_GRACE_S: Final = 5.0
#: So often the desired state may be changed by others between our look and our change.
_LOST_RACES: Final = 100


class Process(NamedTuple):
    """The process of a worker, whatever its incarnation."""

    name: str  # of the worker
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class SignalReceipt:
    """A signal that was given.

    ``ids`` are those of its control entries. Where all was as ordered already, and nobody had
    refused it, nothing was written, and the id is that of the last change: who obeys that one
    obeys this.
    """

    order: Order
    ids: tuple[str, ...] = ()
    is_redundant: bool = False
    workers: tuple[str, ...] = ()  # DRAIN, STOP: who was told, with incarnation, as ``ids``
    #: Their processes. One that is about to become another incarnation is meant all the same.
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class Unacknowledged:
    """A worker that has yet to obey."""

    worker: str  # with its incarnation
    name: str  # without
    reason: str = ""  # why it cannot; "": it has not answered


class Signals:
    """What an operator tells the workers of one yard."""

    def __init__(self, connection: redis.Redis, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._scripts = Scripts(connection, keys)

    def desired_states(self) -> DesiredStates:
        """The desired states of all scopes."""
        return decode_desired(self._fields()[0])

    def give(self, order: Order) -> SignalReceipt:
        """Give a signal, whatever other operators do at the same time.

        Raises:
            desired state.Invalid: it is not allowed now, or lacks what belongs to it.
        """
        if not is_scope(order.scope):
            raise Invalid(
                f"{order.signal}: scope {order.scope!r}: use {ALL}, {model_scope('<name>')} or "
                f"{worker_scope('<name>')}"
            )
        return self._command(order) if order.signal in _VERBS else self._change(order)

    def _change(self, order: Order) -> SignalReceipt:
        """Change the desired state of the order's scope, as it is when nobody comes between."""
        for _ in range(_LOST_RACES):
            fields, now_ms = self._fields()
            found = decode_desired(fields)
            desired_state = found.by_scope.get(order.scope, DesiredState())
            changed = after(desired_state, order, now_ms)
            if changed == desired_state and not self._is_refused(order, found.changed):
                return SignalReceipt(order, (found.changed,), is_redundant=True)
            seen = fields.get(order.scope.encode(), b"")
            if entry := self._scripts.signal(order, seen, changed):
                return SignalReceipt(order, (entry,))
        raise BrokerUnavailable(f"others change the desired state of {order.scope} all the time")

    def _is_refused(self, order: Order, entry: str) -> bool:
        """Whether somebody could not obey the last change: told again, he tries again."""
        return any(one.reason for one in self.holdouts(SignalReceipt(order, (entry,))))

    def _command(self, order: Order) -> SignalReceipt:
        """Tell the workers that are in scope now, each by its incarnation."""
        verb, ids, live = _VERBS[order.signal], [], self._live()
        told = [one for one, info in sorted(live.items()) if _is_in_scope(info, order.scope)]
        for worker in told:
            command = Command(verb=verb, worker=worker, why=order.why)
            ids.append(self._scripts.command(command) or "")
        processes = tuple(_process(live[worker]) for worker in told)
        return SignalReceipt(order, tuple(ids), not told, tuple(told), processes)

    def holdouts(self, given: SignalReceipt) -> list[Unacknowledged]:
        """The workers that have yet to obey, of those that hold a lease."""
        live = self._live()
        answers = self._answers(given.ids)
        if given.order.signal in _VERBS:
            waited_for = [one for one, info in live.items() if _process(info) in given.processes]
        else:
            waited_for = [
                worker
                for worker, info in _newest(live).items()
                if _is_in_scope(info, given.order.scope) and not _has_obeyed(info, given.ids)
            ]
            waited_for = [one for one in waited_for if one not in answers or not answers[one].done]
        return [
            Unacknowledged(one, live[one].name, _reason(answers.get(one)))
            for one in sorted(waited_for)
        ]

    def wait(
        self,
        given: SignalReceipt,
        timeout_s: float,
        enough: Callable[[Iterable[object]], bool] = all,
    ) -> list[Unacknowledged]:
        """Wait until all have obeyed; who has not, after ``timeout_s`` or where the rest refuse.

        With ``enough=any`` the first refusal ends the wait.
        """
        until = time.monotonic() + timeout_s
        while (left := self.holdouts(given)) and not enough(one.reason for one in left):
            if (rest_s := until - time.monotonic()) <= 0:
                break
            time.sleep(min(_POLL_S, rest_s))
        return left

    def reload(
        self, model: str, path: str, epoch: int, mode: PauseMode, timeout_s: float, by: str = ""
    ) -> list[Unacknowledged]:
        """New weights for a model, under a new epoch: pause, load, count on, and run again.

        ``path`` is a checkpoint as the workers' hosts see it, "" for the model's own. It names its
        content: weights at a path that they are from already are not read again. Each host that
        may load the model looks at it before anything is paused. Where a worker cannot have it,
        or has not obeyed in time, all go back to what was before, the old epoch included; those
        who held out are given. ``timeout_s`` bounds the whole. A caller that dies leaves this to
        the leader, once that time is over, or to the same call made again. ``by`` is the operator.

        Raises:
            desired state.Invalid: it is not allowed now, or no host is there that may load the
            model;
                nothing has changed.
        """
        until = time.monotonic() + timeout_s
        scope = model_scope(model)
        orders = self._reload_orders(scope, path, epoch, mode, timeout_s, by)
        if path and (left := self._check(model, path, timeout_s)):
            return left
        try:
            for order in orders:
                rest_s = max(0.0, until - time.monotonic())
                if left := self.wait(self.give(order), rest_s, enough=any):
                    self._go_back(scope, until)
                    return left
        except KeyboardInterrupt:
            self._go_back(scope, time.monotonic())
            raise
        return []

    def end_trial(self, scope: str, why: str) -> SignalReceipt | None:
        """Bring back what was before a reload that is under way; None where none is."""
        for _ in range(_LOST_RACES):
            seen = self._fields()[0].get(scope.encode(), b"")
            desired_state = decode_desired({scope.encode(): seen}).by_scope.get(
                scope, DesiredState()
            )
            if desired_state.trial is None:
                return None
            order, before = undo_reload(scope, desired_state, why)
            if entry := self._scripts.signal(order, seen, before):
                return SignalReceipt(order, (entry,))
        raise BrokerUnavailable(f"others change the desired state of {scope} all the time")

    def _go_back(self, scope: str, until: float) -> None:
        """All to what was before, together with those who have obeyed already."""
        if given := self.end_trial(scope, "the reload has failed"):
            self.wait(given, max(0.0, until - time.monotonic()))

    def _check(self, model: str, path: str, timeout_s: float) -> list[Unacknowledged]:
        """The hosts that may load a model and could not have these weights, or do not answer."""
        asked = {}  # by the id of the command: a worker of each host
        for worker, info in self._one_worker_of_each_host(model):
            command = Command(
                verb="check", worker=worker, model=model, weights=path, why="a reload is asked for"
            )
            asked[self._scripts.command(command) or ""] = Unacknowledged(worker, info.name)
        if not asked:
            raise Invalid(
                f"RELOAD_WEIGHTS: no host that may load {model} is there, so none can look at "
                f"{path}: start one first"
            )
        until = time.monotonic() + timeout_s
        while True:
            answers = self._answers(asked)
            left = [
                replace(one, reason=_reason(answers.get(one.worker)))
                for one in asked.values()
                if one.worker not in answers or not answers[one.worker].done
            ]
            is_over = not left or any(one.reason for one in left) or time.monotonic() >= until
            if is_over:
                return left
            time.sleep(_POLL_S)

    def _one_worker_of_each_host(self, model: str) -> list[tuple[str, WorkerInfo]]:
        """Of the hosts that are there and may load a model."""
        packed: Any = self._connection.hgetall(self._keys.hosts)
        hosts = {name.decode(): _host(entry) for name, entry in packed.items()}
        found = {}
        for worker, info in sorted(self._live().items()):
            host = hosts.get(info.controller)
            if host and any(one.name == model for one in host.models):
                found[info.controller] = (worker, info)
        return list(found.values())

    def _reload_orders(
        self, scope: str, path: str, epoch: int, mode: PauseMode, timeout_s: float, by: str
    ) -> Sequence[Order]:
        """The steps of a reload; refused here is what would fail at a later one, or load nothing.

        A scope that is paused is not paused again. Once the weights are everywhere, they stay
        whatever becomes of the caller.
        """
        fields, now_ms = self._fields()
        desired_state = begun = decode_desired(fields).by_scope.get(scope, DesiredState())
        trial = Trial(
            until_ms=now_ms + int(1000 * (timeout_s + _GRACE_S)),
            weights=begun.trial.weights if begun.trial else begun.weights,
            run_state=begun.trial.run_state if begun.trial else begun.run_state,
        )
        done = Trial(until_ms=trial.until_ms, weights=path)
        orders = (
            Order(signal="PAUSE", scope=scope, mode=mode, why="reload", by=by, trial=trial),
            Order(
                signal="RELOAD_WEIGHTS",
                scope=scope,
                weights=path,
                why="reload",
                by=by,
                trial=trial,
            ),
            Order(
                signal="SET_GENERATION_EPOCH",
                scope=scope,
                epoch=epoch,
                why="reload",
                by=by,
                trial=done,
            ),
            Order(signal="UNPAUSE", scope=scope, why="reload", by=by),
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
        """The hash `desired_state`, and unix ms by the server's clock."""
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.hgetall(self._keys.desired)
        pipeline.time()
        fields, (seconds, micros) = pipeline.execute()
        return dict(fields), seconds * 1000 + micros // 1000

    def _live(self) -> dict[str, WorkerInfo]:
        """What the roster says of the workers that hold a lease."""
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.hgetall(self._keys.workers)
        pipeline.zrange(self._keys.leases, 0, -1, withscores=True)
        pipeline.time()
        roster, leases, (seconds, micros) = pipeline.execute()
        now_ms = seconds * 1000 + micros // 1000
        found = {}
        for worker, expires_ms in leases:
            info = _info(roster.get(worker))
            if info and expires_ms > now_ms:
                found[worker.decode()] = info
        return found

    def _answers(self, ids: Iterable[str]) -> dict[str, Acknowledgement]:
        """What workers have answered to these entries; an answer that cannot be read is none."""
        pipeline = self._connection.pipeline(transaction=False)
        for entry in ids:
            pipeline.hgetall(self._keys.acks(entry))
        found = {}
        for answers in pipeline.execute():
            for worker, packed in answers.items():
                try:
                    found[worker.decode()] = decode_acknowledgement(packed)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
        return found


def _info(packed: bytes | None) -> WorkerInfo | None:
    try:
        return decode_worker(packed or b"")
    except msgspec.MsgspecError:
        return None


def _host(packed: bytes) -> HostInfo | None:
    try:
        return decode_host(packed)
    except msgspec.MsgspecError:
        return None


def _process(info: WorkerInfo) -> Process:
    return Process(info.name, info.host, info.pid)


def _newest(live: Mapping[str, WorkerInfo]) -> dict[str, WorkerInfo]:
    """Without those that have a successor: it is he who answers from now on."""
    by_name: dict[str, str] = {}
    for worker in sorted(live, key=_incarnation):
        by_name[live[worker].name] = worker
    return {worker: live[worker] for worker in by_name.values()}


def _incarnation(worker: str) -> int:
    number = worker.rpartition(".")[2]
    return int(number) if number.isdecimal() else 0


def _is_in_scope(info: WorkerInfo, scope: str) -> bool:
    return scope in {ALL, model_scope(info.model), worker_scope(info.name)}


def _has_obeyed(info: WorkerInfo, ids: tuple[str, ...]) -> bool:
    """Whether it is in accord with these; one whose engine cannot run has nothing to do."""
    return info.state == "failed" or all(position(info.obeyed) >= position(one) for one in ids)


def _reason(answer: Acknowledgement | None) -> str:
    if answer is None or answer.done:
        return ""
    return answer.reason or "it refuses without a reason"
