"""A yard in which every text that a client, a worker or an operator gives is hostile."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from tests.support.api_keys import create_key
from tests.support.builders import entry_fields, make_request, make_worker_info
from tokenyard.batch.rq.jobs import BatchQueue, JobOrder
from tokenyard.batch.state import BatchSpec
from tokenyard.board.pages import PAGES
from tokenyard.ops.audit import AuditEntry, record
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.replies import ErrorInfo, Reply, encode_reply, json_text
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, encode_host, encode_worker

#: It ends tags and attributes, runs scripts, turns the text around, and moves the cursor.
EVIL = (
    "\"'><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</title></section><mark>bold\u202edlrow\u2066\x1b[31m\x00\x9b2J\u2028&lt;{{ 7*7 }}{% x %}"
)
LONG = 1_000_000
#: No page is larger than this, whatever is on the yard.
MOST_BYTES = 300_000
ID = f"evil{EVIL}"
MENU = [page.path for page in PAGES if page.menu]
#: Pages of nothing that there is.
NOWHERE = [
    f"/requests?state=failed&error={quote(EVIL)}",
    f"/requests?client={quote(EVIL)}",
    f"/dead?text={quote(EVIL)}",
    f"/tenants?q={quote(EVIL)}",
    f"/devices/{quote(EVIL, safe='')}",
    f"/batches/{quote(EVIL, safe='')}",
    f"/{quote(EVIL, safe='')}",
]


def write_hostile_yard(yard: Any) -> list[str]:
    """Write to a yard with ``connection``, ``keys`` and ``scripts``; a path of every page."""
    run, keys = yard.connection, yard.keys
    error = json_text(ErrorInfo("POISONED" + EVIL, "it said " + EVIL + "x" * LONG))
    result = Reply(id=ID, event="result", seq=0, tokens=b"", status="failed", error=error)
    told = {"text": EVIL, "worker": "w.1", "attempt": "1", "t1": f"1-0 w.1 because {EVIL}"}
    ledger = {"state": "failed", "sid": "normal/1-0", "ended": "1", "reason": EVIL, **told}
    run.hset(keys.ledger("evil", ID), mapping={**ledger, "result": encode_reply(result)})
    waits = make_request("waits" + EVIL, client="evil", prompt=EVIL + "x" * LONG, model="m" + EVIL)
    run.xadd(keys.intake("low"), {**entry_fields(waits), b"session": EVIL.encode()})
    letter = {**entry_fields(waits), b"dead_reason": EVIL.encode(), b"dead_sid": b"normal/1-0"}
    letters = [
        run.xadd(keys.dead, {**letter, EVIL.encode(): EVIL.encode()}),
        run.xadd(keys.dead, {EVIL: EVIL, "id": "x" * LONG, "dead_reason": EVIL, "dead_sid": EVIL}),
        # The last possible entry: its time is none that can be written.
        run.xadd(
            keys.dead,
            {"id": "q", "common": "[" * 100_000, "dead_reason": b"\xff\xfe"},
            f"{2**64 - 1}-1",
        ),
    ]
    run.hset(keys.tenants, mapping={"evil": encode_tenant(TenantSettings(models=[EVIL]))})
    run.zadd(keys.service, {"evil": 1, "y" + EVIL: 2})
    models = [ModelInfo(name="large" + EVIL, fault="no " + EVIL, adapters=[EVIL])]
    run.hset(keys.hosts, "host", encode_host(HostInfo(name="host", host=EVIL, models=models)))
    fields: Any = {"model": "m" + EVIL, "engine": EVIL, "host": EVIL, "weights": EVIL}
    info = make_worker_info("w", last_error=EVIL + "x" * LONG, **fields)
    yard.scripts.register("w", 600_000, encode_worker(info))
    create_key(Yard(run, keys), "evil", name=EVIL, models=[EVIL], role="viewer")
    entry = AuditEntry(who=EVIL, role=EVIL, action=EVIL, target=EVIL, why=EVIL, text=EVIL)
    record(Yard(run, keys), entry)
    desired = {"run_state": "PAUSED", "why": EVIL + "x" * 100_000, "by": EVIL}
    run.hset(keys.desired, "worker:w", json.dumps(desired))
    return [
        *MENU,
        *(f"/dead/{letter.decode()}" for letter in letters),
        f"/request?client=evil&id={quote(ID)}",
        f"/request?client=evil&id={quote('waits' + EVIL)}",
        f"/model?name={quote('m' + EVIL)}",
        "/tenants/evil",
        "/devices/w",
        f"/batches/{_write_batch(BatchQueue(run, keys.yard))}",
    ]


def _write_batch(queue: BatchQueue) -> str:
    long = EVIL + "y" * LONG
    spec = BatchSpec(input=f"/data/{long}", output=f"/data/{long}o", tenant=long, model=EVIL)
    job = queue.enqueue(JobOrder(spec=spec)).id
    meta = {"status": EVIL, "message": EVIL, "request_counts": {"total": 9}}
    queue.rq.connection.hset(queue.find(job).key, "meta", json.dumps(meta))
    queue.rq.connection.rpush(queue.rq.key, f"no such {EVIL}", b"\xff")
    return job
