"""The schedule of faults of a chaos run, determined by the seed alone."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Part = Literal["worker", "core", "controller", "host", "coordinator", "broker", "client", "gateway"]
Act = Literal["kill", "crash", "stop", "term", "cut", "flush", "trim"]
#: The target and the action: SIGKILL, SIGSEGV, SIGSTOP and later SIGCONT, or SIGTERM; for the
#: broker also cutting all connections, flushing the script cache, or deleting the intakes' entries.
Kind = tuple[Part, Act]

#: Relative frequency of each kind. A worker is one process with an engine, in vLLM the front of one
#: with a core; a host is a controller with all its workers. Ended processes are started again,
#: worker processes by their controller.
WEIGHTS: Final[Mapping[Kind, int]] = {
    ("worker", "kill"): 30,
    ("worker", "crash"): 6,
    ("worker", "stop"): 6,
    ("worker", "term"): 2,
    ("core", "kill"): 10,
    ("core", "crash"): 4,
    ("core", "stop"): 4,
    ("controller", "kill"): 6,
    ("controller", "stop"): 6,
    ("controller", "term"): 6,
    ("host", "kill"): 6,
    ("host", "stop"): 8,
    ("coordinator", "kill"): 10,
    ("coordinator", "stop"): 6,
    ("coordinator", "term"): 5,
    ("broker", "kill"): 4,
    ("broker", "term"): 2,
    ("broker", "stop"): 3,
    ("broker", "cut"): 4,
    ("broker", "flush"): 2,
    ("broker", "trim"): 4,
    ("client", "kill"): 4,
    ("gateway", "kill"): 8,
    ("gateway", "term"): 5,
    ("gateway", "stop"): 4,
}
#: Each comes once before the random ones; the shortest run has the first two.
FIRST: Final[tuple[Kind, ...]] = (
    ("worker", "kill"),
    ("gateway", "kill"),
    ("core", "kill"),
    ("coordinator", "kill"),
    ("broker", "kill"),
    ("worker", "crash"),
    ("gateway", "term"),
    ("broker", "trim"),
    ("controller", "kill"),
)


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and durations of faults, in seconds."""

    gap_s: tuple[float, float]  # from one fault to the next
    start_s: float  # added if a controller has to start, with all its workers
    gateway_s: float  # from one fault of a gateway to the next: one of two should serve
    down_s: tuple[float, float]  # from an end to the next start
    stopped_s: Mapping[Part, tuple[float, float]]  # from SIGSTOP to SIGCONT


#: Leases here are 2 s (workers) and 1 s (leader); most stops last longer.
FAST: Final = Pace(
    gap_s=(0.2, 2.4),
    start_s=1.0,
    gateway_s=10.0,
    down_s=(0.0, 1.0),
    stopped_s={
        "worker": (0.5, 5.0),
        "core": (0.5, 5.0),
        "controller": (1.0, 5.0),
        "host": (1.0, 5.0),
        "coordinator": (0.5, 3.0),
        "broker": (0.2, 1.5),
        "client": (0.2, 3.0),
        "gateway": (1.0, 8.0),
    },
)
#: On two cores, a vLLM worker takes half a minute to restart.
SLOW: Final = Pace(
    gap_s=(2.0, 7.0),
    start_s=20.0,
    gateway_s=15.0,
    down_s=FAST.down_s,
    stopped_s=FAST.stopped_s,
)


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of the schedule."""

    at_s: float  # from the start
    kind: Kind
    which: float  # 0 to 1: chooses among the processes that exist at that time
    lasts_s: float  # until SIGCONT, or until the restart


def schedule(seed: int, seconds: float, pace: Pace, parts: Collection[Part] = ()) -> list[Planned]:
    """The faults of a run of ``seconds``, restricted to ``parts`` if given."""
    draw = random.Random(f"faults {seed}")
    kinds = [kind for kind in WEIGHTS if not parts or kind[0] in parts]
    due = [kind for kind in FIRST if kind in kinds]
    faults: list[Planned] = []
    at_s, gateways_at_s = draw.uniform(*pace.gap_s), 0.0
    while at_s < seconds:
        able = [kind for kind in kinds if kind[0] != "gateway" or at_s >= gateways_at_s]
        if able:
            kind = next((one for one in due if one in able), None)
            if kind is None:
                [kind] = draw.choices(able, [WEIGHTS[one] for one in able])
            else:
                due.remove(kind)
            part, act = kind
            bounds = pace.stopped_s[part] if act == "stop" else pace.down_s
            faults.append(Planned(at_s, kind, draw.random(), draw.uniform(*bounds)))
            if part == "gateway":
                gateways_at_s = at_s + pace.gateway_s
            if part in ("controller", "host") and act != "stop":
                at_s += pace.start_s
        at_s += draw.uniform(*pace.gap_s)
    return faults
