"""The users of `deploy/users.acl` can do all their work, and have no further rights."""

from __future__ import annotations

import redis

from coordinator.recovery.usage_pruner import UsagePruner
from tests.deploy import day as work
from tests.deploy.day import Day
from tests.deploy.rights import denied, granted, in_scripts, monitored
from tests.support.brokers import GuardedServer
from tests.support.builders import random_name
from tests.support.waiting import eventually
from tokenyard.clock import BrokerTime
from tokenyard.protocol.keys import Keys, Yard

#: The scripts that each user calls.
SCRIPTS = {
    "client": {"submit", "attend", "request_cancel", "probe"},
    "coordinator": {
        *(
            "probe",
            "lead",
            "resign",
            "take_over",
            "dispatch",
            "answer",
            "bury",
            "rescue",
            "overdue",
        ),
        *("watch_clients", "cancel", "command", "recognize", "signal"),
        *("acquit", "astray", "reconcile", "transfer", "recount", "record", "stand_by"),
    },
    "worker": {
        "probe",
        "register",
        "renew",
        "retire",
        "hand_back",
        "emit",
        "finish",
        "settle_cancelled",
        "acknowledge",
    },
    "admin": {"cancel", "requeue", "command", "signal", "configure", "probe", "astray"},
}
#: Needed only after faults that no test here causes, or while an entry happens to be pending.
SELDOM = {"client": {"xtrim"}, "worker": {"script"}, "admin": {"script", "xpending"}}


def test_a_day_of_work_needs_exactly_the_rights_of_the_users(guarded: GuardedServer) -> None:
    # Given a yard whose processes, clients and operator have only the rights of their users
    day = Day(guarded)
    denied(guarded)
    with monitored(guarded) as seen, day.plant:
        day.coordinator()
        day.worker("frail", slots=2, crash_point="poison:1", model_name="sim")
        day.plant.wait_for_workers(2)

        # If each does all its work,
        work.client_asks(day)
        work.client_asks_by_hand(day)
        work.tenants_ask(day)
        work.client_cancels(day)
        work.client_vanishes(day)
        work.requests_are_bad(day)
        work.entry_is_from_the_future(day)
        work.workers_fail(day)
        work.models_are_placed(day)
        work.operator_acts(day)
        work.board_is_used(day)
        work.operator_looks_for_faults(day)
        work.operator_signals(day)
        work.metrics_are_read(day)
        work.everybody_goes(day)

    # I expect no refused command,
    assert denied(guarded) == []
    # and no unused right.
    for user, scripts in SCRIPTS.items():
        used = seen[user] | in_scripts(scripts) | SELDOM.get(user, set())
        assert granted(user) - used == set(), user


def test_the_coordinator_s_user_may_prune_usage(guarded: GuardedServer) -> None:
    """It is not due on a day of work."""
    keys = Keys(random_name("yard"))
    usage = keys.usage("ann")
    with (
        redis.Redis.from_url(guarded.url_of("default")) as keeper,
        redis.Redis.from_url(guarded.url_of("coordinator")) as connection,
    ):
        keeper.zadd(keys.service, {"ann": 1})
        keeper.hset(usage, mapping={"20200101 m in": 1, "29990101 m in": 1})
        denied(guarded)
        pruner = UsagePruner(Yard(connection, keys), BrokerTime())

        def is_pruned() -> bool:
            pruner.run_once("1:c")
            return keeper.hkeys(usage) == [b"29990101 m in"]

        eventually(is_pruned)
        assert denied(guarded) == []
