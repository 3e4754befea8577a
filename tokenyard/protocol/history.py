"""The entries of the stream ``history``: figures of a yard over some seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass
from tokenyard.protocol.streams import whole

#: Time between two entries, and entries that are kept, about: an hour and a bit.
EVERY_MS: Final = 10_000
MAX_ENTRIES: Final = 400
#: Fields that `record` adds: what waits in each intake, and of these in the intakes of tenants.
WAITING: Final = "waiting:"
OF_TENANTS: Final = "waiting_of_tenants"
_SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_counts_decoder = msgspec.json.Decoder(list[int])


class HistorySample(Struct, frozen=True, kw_only=True):
    """What the leader saw at a moment, and what ended in the seconds before it."""

    at_ms: int  # unix time by the server's clock
    waiting: Mapping[IntakeClass, int]
    of_tenants: int = 0  # of these, in the intakes of tenants
    epoch: int = 0  # of the leader
    running: int = 0  # requests on lanes
    workers: int = 0  # with a lease
    ready: int = 0  # of these, with a model that they can serve
    seconds: float = 0.0  # that the rest covers
    finished: int = 0  # results, without those of cancels
    failed: int = 0  # of these, not completed
    tokens: int = 0  # generated
    dead: int = 0  # dead letters written
    #: By bucket of `tokenyard.telemetry.metrics.BUCKETS_S`; those at the end are left out where 0.
    ttft: Sequence[int] = ()  # of requests that stream: acceptance to first token
    wait: Sequence[int] = ()  # time of a request in its intake

    @property
    def requests_per_s(self) -> float:
        """Results in a second."""
        return self.finished / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens in a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


_NUMBERS: Final = ("epoch", "running", "workers", "ready", "finished", "failed", "tokens", "dead")


def history_fields(sample: HistorySample) -> dict[str, str | bytes | int]:
    """A sample as the fields of its entry, without its time and what waits."""
    fields: dict[str, str | bytes | int] = {name: getattr(sample, name) for name in _NUMBERS}
    fields["seconds"] = f"{sample.seconds:.3f}"
    return fields | {
        "ttft": msgspec.json.encode(sample.ttft),
        "wait": msgspec.json.encode(sample.wait),
    }


def parse_history(entry: str, fields: Mapping[bytes, bytes]) -> HistorySample:
    """The sample of an entry; what cannot be read counts as 0."""
    told = {name.decode(errors="replace"): value for name, value in fields.items()}
    seconds = told.get("seconds", b"").decode(errors="replace")
    return HistorySample(
        at_ms=whole(entry.partition("-")[0]),
        waiting={name: _count(told.get(f"{WAITING}{name}")) for name in INTAKE_CLASSES},
        of_tenants=_count(told.get(OF_TENANTS)),
        seconds=float(seconds) if _SECONDS.fullmatch(seconds) else 0.0,
        ttft=_counts(told.get("ttft", b"")),
        wait=_counts(told.get("wait", b"")),
        **{name: _count(told.get(name)) for name in _NUMBERS},
    )


def _count(value: bytes | None) -> int:
    return max(0, whole(value))


def _counts(packed: bytes) -> Sequence[int]:
    try:
        return _counts_decoder.decode(packed)
    except msgspec.MsgspecError:
        return ()
