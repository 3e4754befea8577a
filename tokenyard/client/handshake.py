"""The handshake: what a client reads about a yard, and the errors where it has no leader.

The leader writes the hash ``info`` (`protocol`, `models`, `default_model`,
`max_num_queued_reqs`, `max_request_bytes`, `coordinator`) and holds the key ``leader``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from tokenyard import clock
from tokenyard.broker.url import public_url
from tokenyard.client.operations import Ask, Delay, Steps
from tokenyard.protocol.errors import (
    BrokerNotWritable,
    NoCoordinator,
    ProtocolMismatch,
    TokenyardError,
)
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.streams import decoded, whole
from tokenyard.protocol.wire import WIRE_VERSION
from tokenyard.protocol.worker_info import WorkerInfo, decode_workers
from tokenyard.scripts.client import probe

_POLL_S: Final = 0.1
_names_decoder = msgspec.json.Decoder(list[str])


class YardInfo(Struct, frozen=True, kw_only=True):
    """What a yard announces."""

    yard: str
    protocol: int
    coordinator: str  # the leader
    models: list[str]
    default_model: str
    max_num_queued_reqs: int  # 0: no limit
    max_request_bytes: int  # 0: no limit
    workers: dict[str, WorkerInfo]  # those that hold a lease now


def read_yard(
    keys: Keys, url: str, timeout_s: float, broker_time: clock.BrokerTime
) -> Steps[YardInfo]:
    """Wait at most ``timeout_s`` for a leader, then read what the yard announces.

    Measures ``broker_time``. Raises `NoCoordinator`, `BrokerNotWritable` where no coordinator can
    lead, or `ProtocolMismatch`.
    """
    give_up = clock.monotonic() + timeout_s
    while True:
        asked_at = clock.monotonic()
        leader, about, told = yield Ask([("GET", keys.leader), ("HGETALL", keys.info), ("TIME",)])
        broker_time.measured(told, asked_at)
        if leader and b"protocol" in about:
            roster = yield Ask(
                [("HGETALL", keys.workers), ("ZRANGEBYSCORE", keys.leases, "(0", "+inf")]
            )
            return _read(keys.yard, leader, about, *roster)
        left_s = give_up - clock.monotonic()
        if left_s <= 0:
            yield from _expect_writable(keys)
            raise NoCoordinator(_no_coordinator(keys.yard, url, timeout_s))
        yield Delay(min(_POLL_S, left_s))


def _expect_writable(keys: Keys) -> Steps[None]:
    """Raises `BrokerNotWritable` where the server takes no writes, so that none can lead."""
    try:
        yield probe(keys)
    except BrokerNotWritable:
        raise
    except TokenyardError:
        return  # this user may not run the probe


def _read(yard: str, leader: bytes, info: Any, roster: Any, leases: Any) -> YardInfo:
    """Read the answers; raises `ProtocolMismatch`."""
    protocol = _number(info, b"protocol")
    if protocol != WIRE_VERSION:
        raise ProtocolMismatch(
            f"yard {yard!r} speaks version {protocol} of the protocol, this client version "
            f"{WIRE_VERSION}: use a client of the yard's release"
        )
    return YardInfo(
        yard=yard,
        protocol=protocol,
        coordinator=leader.decode(errors="replace").partition(":")[2],
        models=decoded(info.get(b"models", b"[]"), _names_decoder.decode) or [],
        default_model=info.get(b"default_model", b"").decode(errors="replace"),
        max_num_queued_reqs=_number(info, b"max_num_queued_reqs"),
        max_request_bytes=_number(info, b"max_request_bytes"),
        workers=decode_workers({name: roster[name] for name in leases if name in roster}),
    )


def _number(info: Mapping[bytes, bytes], name: bytes) -> int:
    return max(0, whole(info.get(name)))


def _no_coordinator(yard: str, url: str, timeout_s: float) -> str:
    shown = public_url(url)
    command = shlex.join(["tokenyard", "--redis-url", shown, "--yard", yard, "coordinator"])
    return (
        f"no coordinator leads yard {yard!r} at {shown} (waited {timeout_s:g} s); "
        f"start one with: {command}"
    )
