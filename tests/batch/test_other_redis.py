"""Batch jobs at a Redis of their own, as for a yard on a Redis Cluster, where RQ does not work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.batch.conftest import WriteLines, completion
from tests.support.builders import random_name
from tests.support.servers import Server
from tokenyard.batch import submit_batch
from tokenyard.batch.rq.jobs import BatchQueue
from tokenyard.broker.connection import batch_connection, open_connection
from tokenyard.broker.url import BATCH_URL_VARIABLE
from tokenyard.cli import main
from tokenyard.doctor import diagnose
from tokenyard.doctor.evidence import gather
from tokenyard.process.program import Exit
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.keys import Keys, Yard

CLUSTER = "redis+cluster://127.0.0.1:1"


def test_jobs_go_to_the_redis_that_the_variable_names(
    valkey_broker: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_lines: WriteLines
) -> None:
    monkeypatch.setenv(BATCH_URL_VARIABLE, valkey_broker.url)
    yard, lines = random_name("yard"), write_lines("in.jsonl", [completion("a")])

    job = submit_batch(lines, tmp_path / "out.jsonl", redis_url=CLUSTER, yard=yard)

    assert job.status()["status"] == "validating"
    assert not job.has_worker
    found = CliRunner().invoke(main, ["--redis-url", CLUSTER, "--yard", yard, "batch", "list"])
    assert f"{job.id} " in found.output
    with open_connection(valkey_broker.url) as connection:
        assert BatchQueue(connection, yard).find(job.id).id == job.id
        other = batch_connection(Yard(open_connection(CLUSTER), Keys(random_name("yard")), CLUSTER))
        assert BatchQueue(other, yard).find(job.id).id == job.id
        other.close()


def test_on_a_cluster_the_variable_is_asked_for(
    valkey_broker: Server, tmp_path: Path, write_lines: WriteLines
) -> None:
    assert BATCH_URL_VARIABLE not in os.environ
    lines = write_lines("in.jsonl", [completion("a")])
    told = f"batch jobs need a Redis that is no Cluster: set {BATCH_URL_VARIABLE}"

    with pytest.raises(SettingsError, match=told):
        submit_batch(lines, tmp_path / "out.jsonl", redis_url=CLUSTER)
    for words in (["batch", "list"], ["batch", "worker", "--burst"]):
        refused = CliRunner().invoke(main, ["--redis-url", CLUSTER, *words])
        assert refused.exit_code == Exit.USAGE
        assert told in refused.stderr
    # `doctor` says it, and looks at everything else. (One server stands in for the Cluster.)
    with open_connection(valkey_broker.url) as connection:
        evidence = gather(Yard(connection, Keys(random_name("yard")), CLUSTER))
    [batches] = [one for one in diagnose(evidence) if one.name == "batches"]
    assert batches.verdict == "unknown"
    assert told in batches.found


def test_doctor_goes_on_while_that_redis_is_away(
    valkey_broker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BATCH_URL_VARIABLE, "redis://127.0.0.1:1")

    with open_connection(valkey_broker.url) as connection:
        evidence = gather(Yard(connection, Keys(random_name("yard")), valkey_broker.url))

    [batches] = [one for one in diagnose(evidence) if one.name == "batches"]
    assert batches.found == "RQ's keys cannot be seen: their Redis does not answer"
    assert not evidence.refused
