"""What the leader writes about the yard: its history, what waits for which model, lost requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from tokenyard.protocol.errors import BrokerUnavailable
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass, Yard
from tokenyard.protocol.streams import decoded, unix_ms, whole

# The entries of the stream ``history``: figures of a yard over some seconds.

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
        ttft=decoded(told.get("ttft", b""), _counts_decoder.decode) or (),
        wait=decoded(told.get("wait", b""), _counts_decoder.decode) or (),
        **{name: _count(told.get(name)) for name in _NUMBERS},
    )


def _count(value: bytes | None) -> int:
    return max(0, whole(value))


# How much work waits and runs in a yard, and how many workers that needs: the leader says it.
#
# It stands in the field ``demand`` of the hash `info`; `/scale` and the metrics show it.

#: The field of `info`.
FIELD: Final = "demand"
#: A leader renews it each second; what is older than this says nothing any more.
FRESH_MS: Final = 30_000


class ModelDemand(Struct, frozen=True):
    """The requests for one model, those of its adapters included."""

    waiting: int = 0  # not on a lane, those of tenants and those in back-off included
    running: int = 0  # on the lanes of its workers
    workers: int = 0  # that these need, and never fewer than are busy or pinned


class YardDemand(Struct, frozen=True):
    """All that waits and runs; ``at_ms`` is by the broker's clock (unix time).

    Under the name "" is what the leader has not read yet, or what names no model.
    """

    at_ms: int
    models: dict[str, ModelDemand]

    def scale(self, model: str | None = None) -> dict[str, Any]:
        """The sums of one model, or of all with each of them, for an autoscaler."""
        if model is not None:
            return {"model": model, **msgspec.structs.asdict(self.models.get(model, _NOTHING))}
        names = msgspec.structs.fields(ModelDemand)
        sums = {
            one.name: sum(getattr(each, one.name) for each in self.models.values()) for one in names
        }
        return {**sums, "models": msgspec.to_builtins(self.models)}


_NOTHING: Final = ModelDemand()


def read_demand(yard: Yard) -> YardDemand:
    """What the leader says. Raises `BrokerUnavailable` where there is none, or it is too old."""
    pipeline = yard.connection.pipeline(transaction=False)
    pipeline.hget(yard.keys.info, FIELD)
    pipeline.time()
    packed, now = pipeline.execute()
    try:
        demand = msgspec.json.decode(packed or b"", type=YardDemand)
    except msgspec.DecodeError as error:
        raise BrokerUnavailable("no coordinator has said yet what waits") from error
    age_ms = unix_ms(now) - demand.at_ms
    if age_ms > FRESH_MS:
        raise BrokerUnavailable(
            f"no coordinator leads: none has said for {age_ms // 1000} s what waits"
        )
    return demand


# The leader's report of its scans for requests whose entry was deleted by hand.

#: Fields of `info`: the last scan of all ledgers (written once a minute), and the last one that has
#: ended a request.
LAST: Final = "reconciled"
LAST_FOUND: Final = "reconciled_found"


class Pass(msgspec.Struct, frozen=True):
    """One scan of all ledgers of the yard. New fields come last, with defaults."""

    at_ms: int  # its end, by the server's clock
    took_s: float
    ledgers: int  # that were read
    ended: int  # requests, as ENTRY_LOST


_pass_decoder: Final = msgspec.json.Decoder(Pass)


def parse_pass(text: str) -> Pass | None:
    """Read an untrusted value; None where it is not valid."""
    return decoded(text, _pass_decoder.decode)
