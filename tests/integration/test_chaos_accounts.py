"""The chaos benchmark reads what a yard counts for its tenants."""

from __future__ import annotations

import redis

from benchmarks.chaos.accounts import read_accounts
from tokenyard.protocol.keys import Keys, Yard

C, ACME = "client-0", "acme"


def test_the_counters_are_read_from_the_broker(connection: redis.Redis, keys: Keys) -> None:
    connection.hset(keys.usage(ACME), "20261123 m in", 3)
    connection.hset(keys.usage(ACME), "20261124 other model in", 4)
    connection.hset(keys.usage(ACME), "20261124 m wait:1", 2)
    connection.hset(keys.usage(ACME), "20261124 m wait:64", 5)
    connection.hset(keys.tenant("idle"), mapping={"running": 2, "lifted": 70})
    connection.zadd(keys.service, {"idle": 71.5})
    connection.zadd(keys.line, {"idle": 71.5})
    connection.hset(keys.tally, "tenants_waiting", 9)
    connection.hset(keys.ledger(C, "1"), "charge", "0 1 2 acme m")
    connection.hset(keys.ledger(C, "2"), "state", "completed")
    # Cancelled: by a worker that will say what it has used, and by one that died
    connection.zadd(keys.leases, {"w.1": 5, "w.2": -2})
    for request, worker in (("3", "w.1"), ("4", "w.2"), ("5", "w.3")):
        fields = {"state": "cancelled", "worker": worker, "charge": "9 1 2 acme m"}
        connection.hset(keys.ledger(C, request), mapping=fields)

    accounts = read_accounts(Yard(connection, keys))

    assert accounts.tenants[ACME].used == {"in": 7, "dispatched": 7}
    idle = accounts.tenants["idle"]
    assert (idle.present["running"], idle.service, idle.lifted) == (2, 71.5, 70)
    assert accounts.line == ["idle"]
    assert accounts.sums["tenants_waiting"] == 9
    assert sorted(accounts.charged) == [keys.ledger(C, "1"), keys.ledger(C, "3")]
    assert not accounts.is_at_rest
