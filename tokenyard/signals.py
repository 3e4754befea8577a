"""Giving control signals to a yard, and seeing who obeys.

A signal changes the posture of a scope (`tokenyard.posture`); the workers bring themselves in
accord with it, whenever they join. DRAIN and STOP leave no posture: they are commands to the
workers that are in scope now. Errors of redis-py pass, for `tokenyard.connection.translated`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import msgspec
import redis

from tokenyard.commands import Acknowledgement, Command, decode_acknowledgement
from tokenyard.errors import BrokerUnavailable
from tokenyard.keys import Keys
from tokenyard.posture import (
    ALL,
    Invalid,
    Order,
    PauseMode,
    Posture,
    Postures,
    Signal,
    after,
    decode_postures,
    is_scope,
    model_scope,
    worker_scope,
)
from tokenyard.scripts import Scripts
from tokenyard.streams import position
from tokenyard.worker_info import WorkerInfo, decode_worker

_VERBS: Final[Mapping[Signal, Literal["drain", "stop"]]] = {"DRAIN": "drain", "STOP": "stop"}
_POLL_S: Final = 0.1
#: So often the posture may be changed by others between our look and our change.
_LOST_RACES: Final = 100


class Process(NamedTuple):
    """The process of a worker, whatever its incarnation."""

    name: str  # of the worker
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Given:
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
class Holdout:
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

    def postures(self) -> Postures:
        """The postures of all scopes."""
        return decode_postures(self._fields())

    def give(self, order: Order) -> Given:
        """Give a signal, whatever other operators do at the same time.

        Raises:
            posture.Invalid: it is not allowed now, or lacks what belongs to it.
        """
        if not is_scope(order.scope):
            raise Invalid(
                f"{order.signal}: scope {order.scope!r}: use {ALL}, {model_scope('<name>')} or "
                f"{worker_scope('<name>')}"
            )
        return self._command(order) if order.signal in _VERBS else self._change(order)

    def _change(self, order: Order) -> Given:
        """Change the posture of the order's scope, as it is when nobody comes between."""
        for _ in range(_LOST_RACES):
            fields = self._fields()
            found = decode_postures(fields)
            posture = found.by_scope.get(order.scope, Posture())
            changed = after(posture, order)
            if changed == posture and not self._is_refused(order, found.changed):
                return Given(order, (found.changed,), is_redundant=True)
            seen = fields.get(order.scope.encode(), b"")
            if entry := self._scripts.signal(order, seen, changed):
                return Given(order, (entry,))
        raise BrokerUnavailable(f"others change the posture of {order.scope} all the time")

    def _is_refused(self, order: Order, entry: str) -> bool:
        """Whether somebody could not obey the last change: told again, he tries again."""
        return any(one.reason for one in self.holdouts(Given(order, (entry,))))

    def _command(self, order: Order) -> Given:
        """Tell the workers that are in scope now, each by its incarnation."""
        verb, ids, live = _VERBS[order.signal], [], self._live()
        told = [one for one, info in sorted(live.items()) if _is_in_scope(info, order.scope)]
        for worker in told:
            command = Command(verb=verb, worker=worker, why=order.why)
            ids.append(self._scripts.command(command) or "")
        processes = tuple(_process(live[worker]) for worker in told)
        return Given(order, tuple(ids), not told, tuple(told), processes)

    def holdouts(self, given: Given) -> list[Holdout]:
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
            Holdout(one, live[one].name, _reason(answers.get(one))) for one in sorted(waited_for)
        ]

    def wait(self, given: Given, timeout_s: float) -> list[Holdout]:
        """Wait until all have obeyed; who has not, after ``timeout_s`` or where the rest refuse."""
        until = time.monotonic() + timeout_s
        while (left := self.holdouts(given)) and not all(one.reason for one in left):
            if (rest_s := until - time.monotonic()) <= 0:
                break
            time.sleep(min(_POLL_S, rest_s))
        return left

    def reload(
        self, model: str, path: str, epoch: int, mode: PauseMode, timeout_s: float
    ) -> list[Holdout]:
        """New weights for a model, under a new epoch: pause, load, count on, and run again.

        ``path`` is a checkpoint as the workers' hosts see it, "" for the model's own. It names its
        content: weights at a path that they are from already are not read again. Where somebody
        holds out the model stays as it is then, mostly PAUSED, and the same call goes on from
        there. ``timeout_s`` bounds the whole.

        Raises:
            posture.Invalid: it is not allowed now; nothing has changed.
        """
        until = time.monotonic() + timeout_s
        for order in self._reload_orders(model_scope(model), path, epoch, mode):
            if left := self.wait(self.give(order), max(0.0, until - time.monotonic())):
                return left
        return []

    def _reload_orders(self, scope: str, path: str, epoch: int, mode: PauseMode) -> Sequence[Order]:
        """The steps of a reload; refused here is what would fail at a later one, or load nothing.

        A scope that is paused is not paused again: who could not load other weights obeys nothing
        until it is given some that it can.
        """
        orders = (
            Order(signal="PAUSE", scope=scope, mode=mode, why="reload"),
            Order(signal="RELOAD_WEIGHTS", scope=scope, weights=path, why="reload"),
            Order(signal="SET_GENERATION_EPOCH", scope=scope, epoch=epoch, why="reload"),
            Order(signal="UNPAUSE", scope=scope, why="reload"),
        )
        posture = begun = self.postures().by_scope.get(scope, Posture())
        for order in orders:
            posture = after(posture, order)
        if begun.conduct != "RUNNING":
            return orders[1:]
        if path and path == begun.weights and epoch != begun.epoch:
            raise Invalid(
                f"RELOAD_WEIGHTS: {scope} has the weights at {path} already: "
                "give each checkpoint a path of its own"
            )
        return orders

    def _fields(self) -> dict[bytes, bytes]:
        fields: Any = self._connection.hgetall(self._keys.posture)
        return dict(fields)

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
