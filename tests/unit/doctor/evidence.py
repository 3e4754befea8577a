"""What a doctor has seen of a yard, made up."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.support.snapshots import make_snapshot, make_view_worker
from tokenyard.doctor import diagnose
from tokenyard.doctor.evidence import Disk, Evidence, Finding, KeySample, Kind
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.leader_reports import LAST, Pass
from tokenyard.protocol.wire import WIRE_VERSION
from tokenyard.telemetry.queues import BatchService
from tokenyard.yard.snapshot import WorkerView
from tokenyard.yard.tenants import TenantView

KEYS = Keys("main")
MIB = 2**20
INFO: dict[str, Any] = {
    "redis_version": "7.2.4",
    "maxmemory_policy": "noeviction",
    "maxmemory": 1000 * MIB,
    "used_memory": 100 * MIB,
    "evicted_keys": 0,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "role": "master",
    "connected_slaves": 0,
    "connected_clients": 10,
    "maxclients": 10_000,
    "rejected_connections": 0,
}
CONFIG = {
    "appendfsync": "everysec",
    "bind": "127.0.0.1",
    "protected-mode": "yes",
    "tcp-keepalive": "300",
    "timeout": "0",
}
SAMPLE = KeySample({"request": Kind(3, 3000)}, {"w.1": 0}, is_whole=True)
PASS = msgspec.json.encode(Pass(at_ms=50_000, took_s=1.5, ledgers=1234, ended=0)).decode()
HANDSHAKE = {"protocol": str(WIRE_VERSION), LAST: PASS}


def sound(**changes: Any) -> Evidence:
    """What is seen of a yard where all is well, but for some changes."""
    snapshot = make_snapshot(60_000, [make_view_worker("w.1")], handshake=HANDSHAKE)
    values: dict[str, Any] = {
        "info": INFO,
        "config": CONFIG,
        "user": "admin",
        "default_is_open": False,
        "refusals": [],
        "snapshot": snapshot,
        "groups": [],
        "tenants": [TenantView(name="ann", refused_lately={"max_tokens": 9})],
        "sample": SAMPLE,
        "disk": Disk("/data", 900 * MIB, 1000 * MIB),
        "batches": BatchService(waiting=1, workers=1),
    }
    return Evidence(**(values | changes))


def found(evidence: Evidence, name: str) -> list[Finding]:
    return [finding for finding in diagnose(evidence) if finding.name == name]


def looked(*workers: WorkerView, **fields: Any) -> Evidence:
    seen = workers or (make_view_worker("w.1"),)
    return sound(snapshot=make_snapshot(60_000, seen, **({"handshake": HANDSHAKE} | fields)))
