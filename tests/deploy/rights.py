"""The commands that a server gets from its users, grants and refuses them."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Collection, Iterator
from typing import Any

import redis

from tests.support.brokers import DEPLOY, GuardedServer
from tokenyard.scripts.calls import source


def denied(server: GuardedServer) -> list[str]:
    """The refused commands with their users since the previous call."""
    with redis.Redis.from_url(server.url_of("default")) as connection:
        entries: Any = connection.acl_log()
        connection.acl_log_reset()
    return [
        f"{one['username']}: {one['context']} {one['reason']} {one['object']}" for one in entries
    ]


def is_refused(connection: redis.Redis, *command: object) -> bool:
    run: Any = connection
    try:
        run.execute_command(*command)
    except redis.exceptions.NoPermissionError:
        return True
    except redis.ResponseError as fault:
        # A server refuses a command inside a script with this message.
        if re.search("ACL failure|The user executing the script can't", str(fault)):
            return True
        raise
    return False


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


def in_scripts(scripts: Collection[str]) -> set[str]:
    """The commands in scripts."""
    called = (re.findall(r"\bp?call\(\s*'([A-Z]+)'", source(name)) for name in scripts)
    return {name.lower() for names in called for name in names}
