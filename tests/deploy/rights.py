"""Whether a server refuses a command to a user."""

from __future__ import annotations

import re
from typing import Any

import redis

from tests.support.brokers import GuardedServer


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
