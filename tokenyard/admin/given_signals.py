"""The signals that were given lately, from the control stream.

Errors of redis-py pass, for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenyard.protocol.commands import parse_command
from tokenyard.protocol.control import Order, Signal, parse_order, said, worker_scope
from tokenyard.protocol.texts import counted
from tokenyard.protocol.worker_info import WorkerInfo
from tokenyard.protocol.yard import Yard

#: Entries of the stream that are read: about all that it keeps.
MOST_READ: Final = 1_000
#: Commands to several workers that come so close after each other are one signal.
_TOGETHER_MS: Final = 5_000
_SIGNALS: Final[Mapping[str, Signal]] = {"drain": "DRAIN", "stop": "STOP"}


@dataclass(frozen=True, slots=True)
class GivenSignal:
    """A signal as it was given."""

    at_ms: int  # unix time by the server's clock
    signal: Signal
    whom: str  # "model adder", "3 workers"
    by: str  # the operator; "": unknown
    why: str
    #: DRAIN, STOP: the workers with their incarnations, of those entries that were read.
    workers: Sequence[str] = ()
    details: str = ""  # "mode wait", "epoch 7"


def read_given_signals(yard: Yard) -> list[GivenSignal]:
    """The newest signals, the newest first."""
    found: Any = yard.connection.xrevrange(yard.keys.control, count=MOST_READ)
    given: list[GivenSignal] = []
    for one in _read(found):
        if given and _are_one(given[-1], one):
            given[-1] = _with(one, given[-1])
        else:
            given.append(one)
    return given


def still_there(given: GivenSignal, live: Mapping[str, WorkerInfo]) -> list[str]:
    """The live workers, with their incarnation, whose process was told to end and has not.

    A process may have become another incarnation since.
    """
    names = {worker.rpartition(".")[0] for worker in given.workers}
    return [
        worker
        for worker, info in sorted(live.items())
        if info.name in names and info.started_ms <= given.at_ms
    ]


def _read(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> Iterator[GivenSignal]:
    for entry, fields in entries:
        at_ms = int(entry.partition(b"-")[0])
        if order := parse_order(fields):
            whom, details = said(order.scope), _details(order)
            yield GivenSignal(at_ms, order.signal, whom, order.by, order.why, details=details)
        elif (command := parse_command(fields)) and command.verb in _SIGNALS:
            whom = said(worker_scope(command.worker.rpartition(".")[0]))
            signal = _SIGNALS[command.verb]
            yield GivenSignal(at_ms, signal, whom, command.by, command.why, (command.worker,))


def _details(order: Order) -> str:
    match order.signal:
        case "PAUSE":
            return f"mode {order.mode}"
        case "SET_GENERATION_EPOCH":
            return f"epoch {order.epoch}"
        case "RELOAD_WEIGHTS":
            return f"weights {order.weights or 'of the model itself'}"
        case _:
            return ""


def _are_one(later: GivenSignal, earlier: GivenSignal) -> bool:
    """Whether both are of one DRAIN or STOP to several workers."""
    same = (later.signal, later.by, later.why) == (earlier.signal, earlier.by, earlier.why)
    is_near = later.at_ms - earlier.at_ms < _TOGETHER_MS
    return same and is_near and bool(later.workers and earlier.workers)


def _with(earlier: GivenSignal, later: GivenSignal) -> GivenSignal:
    workers = (*earlier.workers, *later.workers)
    whom = counted(len(workers), "worker")
    return GivenSignal(
        earlier.at_ms, earlier.signal, whom, earlier.by, earlier.why, workers, earlier.details
    )
