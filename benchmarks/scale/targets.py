"""The targets of `benchmarks.scale`: pure functions of its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

Part = Literal["workers", "backlog", "clients", "map", "tenants", "yards"]
#: By size, by name.
Figures = Mapping[str, Mapping[str, float]]

#: Cost of a request with 1,000 workers relative to 2, with equally many results per step.
WORKERS_RATIO: Final = 1.3
#: Bytes of a waiting request beyond its payload.
BYTES: Final = 400.0
#: With fewer waiting requests, the broker's fixed memory distorts the figure.
LEAST_WEIGHED: Final = 100_000
#: Largest deviation of rate and latency from those of an empty yard.
BACKLOG_SHARE: Final = 0.1
#: Largest growth of memory from the first look to the last.
FLAT: Final = 1.1


def missed(part: Part, figures: Figures) -> list[str]:
    """Targets that were missed or not measured, in words."""
    return list(_CHECKS[part](figures)) if part in _CHECKS else []


def has_targets(part: Part) -> bool:
    """Whether a part has targets."""
    return part in _CHECKS


def _workers(figures: Figures) -> Iterator[str]:
    if not {"2", "1000"} <= figures.keys():
        yield "workers: not measured with 2 and with 1,000"
        return
    ratio = figures["1000"]["full_us"] / figures["2"]["full_us"]
    if ratio > WORKERS_RATIO:
        yield f"workers: a request costs {ratio:.2f} times as much with 1,000, not {WORKERS_RATIO}"


def _backlog(figures: Figures) -> Iterator[str]:
    for waiting, one in figures.items():
        beyond = one["bytes_beyond_payload"]
        if beyond > BYTES and int(waiting) >= LEAST_WEIGHED:
            yield f"backlog of {waiting}: {beyond:.0f} bytes each beyond payload, not {BYTES:g}"
        if one["dispatch_ratio"] < 1 - BACKLOG_SHARE:
            yield f"backlog of {waiting}: dispatched at {one['dispatch_ratio']:.2f} of the rate"
        if one["submit_ratio"] > 1 + BACKLOG_SHARE:
            yield f"backlog of {waiting}: submitting takes {one['submit_ratio']:.2f} of the time"


def _map(figures: Figures) -> Iterator[str]:
    for name, ratio in figures["grown"].items():
        if ratio > FLAT:
            yield f"map: the {name} has grown to {ratio:.2f} of what it was"


def _yards(figures: Figures) -> Iterator[str]:
    for count, one in figures.items():
        if one["ratio"] < 1:
            yield f"{count} yards: {one['ratio']:.2f} of the speed of one"


_CHECKS: Final[Mapping[Part, Callable[[Figures], Iterator[str]]]] = {
    "workers": _workers,
    "backlog": _backlog,
    "map": _map,
    "yards": _yards,
}
