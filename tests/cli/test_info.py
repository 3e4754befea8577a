"""`tokenyard info` of a running yard."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.running import Ask
from tokenyard.process.program import Exit


def test_view_is_printed_as_json(ask: Ask, yard: dict[str, Any]) -> None:
    result = ask("info", "--json")
    assert result.exit_code == Exit.OK, result.output
    view = json.loads(result.stdout)
    assert view["yard"] == "main"
    assert view["models"] == {"simulated": 2}
    assert {worker["state"] for worker in view["workers"]} == {"ready"}
    assert view["handshake"]["protocol"] == "1"


def test_the_table_names_every_worker(ask: Ask) -> None:
    workers = [each["worker"] for each in json.loads(ask("info", "--json").stdout)["workers"]]
    table = ask("info").stdout
    assert all(worker in table for worker in workers)
    assert "simulated (2 workers)" in table
