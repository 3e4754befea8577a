"""`tokenyard doctor` against a running yard and against badly configured servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from tests.cli.running import Ask, tokenyard
from tests.support.builders import make_request, random_name, worker_json
from tests.support.servers import Server, limited_user
from tokenyard.doctor import diagnose
from tokenyard.doctor.evidence import gather
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.scripts import Scripts


@pytest.fixture
def own(new_server: Callable[..., Server]) -> Server:
    """A server without AOF, whose settings a test may change."""
    return new_server("valkey", aof=False)


def verdicts(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        finding = json.loads(line)
        found.setdefault(finding["name"], set()).add(finding["verdict"])
    return found


@pytest.mark.long
def test_a_healthy_yard_has_no_faults(yard: dict[str, Any]) -> None:
    done = tokenyard("--redis-url", yard["url"], "doctor", "--json")

    assert done.returncode == Exit.OK, done.stdout + done.stderr
    found = verdicts(done.stdout)
    assert not any("fault" in each for each in found.values())
    assert found["coordinator"] == {"ok"}
    assert found["groups"] == {"ok"}
    assert found["lanes"] == {"ok"}


def test_the_default_output_lists_only_problems(ask: Ask, yard: dict[str, Any]) -> None:
    assert "maxmemory" not in ask("doctor").stdout, "`up` has set it"
    with redis.Redis.from_url(yard["url"]) as connection:
        before = connection.config_get("maxmemory")["maxmemory"]
        connection.config_set("maxmemory", 0)
        some, all_of_it = ask("doctor").stdout, ask("doctor", "--all").stdout
        connection.config_set("maxmemory", before)

    assert "CONFIG SET maxmemory" in some
    assert "0 faults" in some
    assert "ok" not in some.split()
    assert "eviction" in all_of_it


def test_faults_set_the_exit_status(own: Server) -> None:
    with redis.Redis.from_url(own.url) as connection:
        connection.config_set("maxmemory-policy", "allkeys-lru")
        connection.config_set("tcp-keepalive", 0)

    done = tokenyard("--redis-url", own.url, "--yard", random_name("yard"), "doctor", "--json")

    assert done.returncode == Exit.FAILED
    found = verdicts(done.stdout)
    for name in ("eviction", "persistence", "coordinator", "workers"):
        assert found[name] == {"fault"}, name
    assert found["time-outs"] == {"warning"}


@pytest.mark.long
def test_checks_that_a_user_may_not_make_are_unknown(own: Server) -> None:
    # Given a user with the rights of a managed server
    with limited_user(own.url, "+@all", "-@admin", "-info", "-scan") as url:
        done = tokenyard("--redis-url", url, "doctor", "--json")

    found = verdicts(done.stdout)
    for name in ("version", "time-outs", "keys", "lanes", "access"):
        assert found[name] == {"unknown"}, name
    assert found["coordinator"] == {"fault"}
    assert "CONFIG is refused" in done.stdout


@pytest.mark.long
def test_a_user_without_rights_is_named(own: Server) -> None:
    with limited_user(own.url, "+@connection", "+time") as url:
        done = tokenyard("--redis-url", url, "doctor")
    blind = urlsplit(url).username

    assert done.returncode == Exit.FAILED
    assert f"we are user {blind}, who may not read the yard" in done.stdout

    # If a user with the rights looks, I expect the refused user in the findings
    with redis.Redis.from_url(own.url) as connection:
        findings = list(diagnose(gather(Yard(connection, Keys("main"), own.url))))
    assert any(f"user {blind} was refused command" in finding.found for finding in findings)


def test_foreign_lanes_and_groups_are_found(
    connection: redis.Redis, keys: Keys, scripts: Scripts, broker: Server
) -> None:
    # Given a lost worker, a lane without a worker, and a foreign consumer group
    scripts.lead("north", 60_000)
    worker = scripts.register("w", 60_000, worker_json("w"))
    connection.xadd(keys.lane(worker), {"id": "q"})
    connection.zadd(keys.leases, {worker: 1})
    connection.xadd(keys.lane("nobody.9"), {"id": "q"})
    scripts.submit("low", [make_request()])
    connection.xgroup_create(keys.intake("low"), "somebody", id="0")

    findings = {f.name: f for f in diagnose(gather(Yard(connection, keys, broker.url))) if f.todo}

    assert worker in findings["leases"].found
    assert "nobody.9 (1)" in findings["lanes"].found
    groups = [
        f.found for f in diagnose(gather(Yard(connection, keys, broker.url))) if f.name == "groups"
    ]
    assert any("'somebody'" in each for each in groups)
    kinds = gather(Yard(connection, keys, broker.url)).sample
    assert kinds
    assert kinds.kinds["lane"].count == 2
    assert kinds.kinds["request"].bytes > 0
