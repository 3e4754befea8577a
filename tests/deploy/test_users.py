"""The users of `deploy/users.acl` can do all their work, and have no further rights."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator

import redis

from tests.deploy import day as work
from tests.deploy.day import Day
from tests.deploy.rights import denied
from tests.support.brokers import DEPLOY, GuardedServer
from tokenyard.scripts import source

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
        *("acquit", "astray", "reconcile"),
        *("collect", "settle", "submit", "attend"),  # for guests
    },
    "worker": {
        "probe",
        "register",
        "renew",
        "retire",
        "hand_back",
        "emit",
        "finish",
        "acknowledge",
    },
    "admin": {"cancel", "requeue", "command", "signal", "probe", "astray"},
}
#: Needed only after faults that no test here causes.
SELDOM = {"client": {"xtrim"}, "worker": {"script"}, "admin": {"script"}}


@contextlib.contextmanager
def monitored(server: GuardedServer) -> Iterator[dict[str, set[str]]]:
    """Collect the commands that the server receives, by user, without those of scripts."""
    names: dict[str, str] = {}
    seen: dict[str, set[str]] = {}
    connection = redis.Redis.from_url(server.url_of("default"))
    with connection, connection.monitor() as monitor:

        def listen() -> None:
            for item in monitor.listen():
                words, peer = item["command"].split(), item["client_port"]
                if words[:2] == ["ECHO", "over"]:
                    return
                if [word.lower() for word in words[:2]] == ["client", "setname"]:
                    names[peer] = words[2]
                elif item["client_type"] != "lua":
                    seen.setdefault(names.get(peer, ""), set()).add(words[0].lower())

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield seen
        finally:
            connection.echo("over")
            listener.join(30)


def granted(user: str) -> set[str]:
    """The commands that the file gives a user, without categories."""
    (line,) = (
        one for one in (DEPLOY / "users.acl").read_text().splitlines() if f" {user} " in one[:20]
    )
    return {name.partition("|")[0] for name in re.findall(r"\+([a-z|]+)", line)}


def in_scripts(user: str) -> set[str]:
    """The commands in the scripts that a user calls."""
    called = (re.findall(r"redis\.p?call\(\s*'([A-Z]+)'", source(name)) for name in SCRIPTS[user])
    return {name.lower() for names in called for name in names}


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
        work.client_cancels(day)
        work.client_vanishes(day)
        work.requests_are_bad(day)
        work.entry_is_from_the_future(day)
        work.workers_fail(day)
        work.models_are_placed(day)
        work.operator_acts(day)
        work.operator_looks_for_faults(day)
        work.operator_signals(day)
        work.metrics_are_read(day)
        work.everybody_goes(day)

    # I expect no refused command,
    assert denied(guarded) == []
    # and no unused right.
    for user in SCRIPTS:
        used = seen[user] | in_scripts(user) | SELDOM.get(user, set())
        assert granted(user) - used == set(), user
