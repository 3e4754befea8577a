"""A lane's reader gives each request what its model says of sampling."""

from __future__ import annotations

import redis

from tests.support.builders import make_request
from tests.support.servers import Server
from tests.support.yard import Yard
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.wire import Assignment, SamplingParams
from tokenyard.scripts import Scripts
from worker.process.reader import LaneReader


def test_a_model_says_what_a_request_leaves_out(
    connection: redis.Redis, keys: Keys, scripts: Scripts, broker: Server
) -> None:
    """Given two requests / If one names a temperature / I expect the model's for the other."""
    yard = Yard(connection, keys, scripts)
    worker = yard.worker()
    yard.assign(worker, make_request("silent"))
    yard.assign(worker, make_request("warm", params=SamplingParams(temperature=0.5)))
    delivered: list[Assignment] = []
    with redis.Redis.from_url(broker.url, socket_timeout=10.0) as own:
        reader = LaneReader(
            own,
            yard.keys,
            worker,
            delivered.extend,
            cancel=lambda entry: None,
            block_ms=100,
            sampling={"temperature": 0, "max_tokens": 5},
        )
        reader.run_once()

    read = [assignment.request for assignment in delivered]
    assert [(each.id, each.params) for each in read] == [
        ("silent", SamplingParams(temperature=0, max_tokens=5)),
        ("warm", SamplingParams(temperature=0.5, max_tokens=5)),
    ]
