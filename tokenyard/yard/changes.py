"""The last signals and commands to workers, by the leader and by operators, and what came of them.

The control stream is bounded, so this is no whole history; answers expire. Errors of redis-py pass,
for `tokenyard.broker.connection.translated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Final

from tokenyard.protocol import control
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.streams import position, readable
from tokenyard.protocol.texts import counted
from tokenyard.protocol.worker_info import WorkerInfo

#: Verbs that change who holds a model, and all that change what a worker does.
PLACING: Final[frozenset[control.Verb]] = frozenset({"load", "unload", "sleep", "wake"})
CHANGING: Final[frozenset[control.Verb]] = frozenset({*PLACING, "drain", "stop"})
#: Entries of the control stream that are read; signals are among them.
_MOST_COMMANDS: Final = 200


@dataclass(frozen=True, slots=True)
class RecentCommand:
    """A command that was sent, and the answer if there is one."""

    id: str
    command: control.Command
    answer: control.Acknowledgement | None = None  # None: not yet, or it has expired

    @property
    def at_ms(self) -> int:
        """When it was sent, unix ms by the server's clock."""
        return position(self.id)[0]

    @property
    def worker_name(self) -> str:
        """The worker's name without its incarnation."""
        return self.command.worker.rpartition(".")[0] or self.command.worker


def recent_commands(
    yard: Yard,
    most: int,
    *,
    model: str = "",
    worker: str = "",
    verbs: AbstractSet[control.Verb] = PLACING,
) -> list[RecentCommand]:
    """The newest commands with these verbs, the newest first.

    Optionally those that load ``model``, or those to the worker of this name.
    """
    sent = (
        RecentCommand(entry, given)
        for entry, given in _newest(yard, _MOST_COMMANDS)
        if isinstance(given, control.Command) and given.verb in verbs
    )
    wanted = [
        one for one in sent if model in {"", one.command.model} and worker in {"", one.worker_name}
    ][:most]
    answers = read_acknowledgements(yard, [one.id for one in wanted])
    return [replace(one, answer=next(iter(answers[one.id].values()), None)) for one in wanted]


def _newest(yard: Yard, most: int) -> Iterator[tuple[str, control.Order | control.Command]]:
    """What the control stream has, with the ids of its entries, the newest first."""
    found: Any = yard.connection.xrevrange(yard.keys.control, count=most)
    for entry, fields in found:
        if given := control.parse_order(fields) or control.parse_command(fields):
            yield entry.decode(), given


def read_acknowledgements(
    yard: Yard, ids: Iterable[str]
) -> dict[str, dict[str, control.Acknowledgement]]:
    """What workers acknowledged, by entry of the control stream and worker.

    What cannot be decoded is left out.
    """
    entries = list(ids)
    pipeline: Any = yard.connection.pipeline(transaction=False)
    for entry in entries:
        pipeline.hgetall(yard.keys.acks(entry))
    return {
        entry: dict(readable(answers, control.decode_acknowledgement))
        for entry, answers in zip(entries, pipeline.execute(), strict=True)
    }


#: Entries of the stream that are read: about all that it keeps.
MOST_READ: Final = 1_000
#: Commands to several workers that come so close after each other are one signal.
_TOGETHER_MS: Final = 5_000
_SIGNALS: Final[Mapping[str, control.Signal]] = {"drain": "DRAIN", "stop": "STOP"}


@dataclass(frozen=True, slots=True)
class GivenSignal:
    """A signal as it was given."""

    at_ms: int  # unix time by the server's clock
    signal: control.Signal
    whom: str  # "model adder", "3 workers"
    by: str  # the operator; "": unknown
    why: str
    #: DRAIN, STOP: the workers with their incarnations, of those entries that were read.
    workers: Sequence[str] = ()
    details: str = ""  # "mode wait", "epoch 7"


def read_given_signals(yard: Yard) -> list[GivenSignal]:
    """The newest signals, the newest first."""
    found: list[GivenSignal] = []
    for entry, given in _newest(yard, MOST_READ):
        at_ms = position(entry)[0]
        if isinstance(given, control.Order):
            whom, details = control.said(given.scope), _details(given)
            signal = GivenSignal(at_ms, given.signal, whom, given.by, given.why, details=details)
            found.append(signal)
        elif given.verb in _SIGNALS:
            whom = control.said(control.worker_scope(given.worker.rpartition(".")[0]))
            signal = GivenSignal(
                at_ms, _SIGNALS[given.verb], whom, given.by, given.why, (given.worker,)
            )
            if found and _are_one(found[-1], signal):
                workers = (given.worker, *found.pop().workers)
                signal = replace(signal, workers=workers, whom=counted(len(workers), "worker"))
            found.append(signal)
    return found


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


def _details(order: control.Order) -> str:
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
