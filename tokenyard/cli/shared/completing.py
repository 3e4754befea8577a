"""What the shell proposes for names that only the yard knows: models, workers, batch jobs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import click
import redis
from click.shell_completion import CompletionItem
from click.types import StringParamType

from tokenyard.admin.snapshot import read_yard
from tokenyard.broker.connection import open_connection
from tokenyard.cli.shared.lazy import LazyGroup
from tokenyard.cli.shared.names import known_models, living
from tokenyard.process.running import YARD_DEFAULT, running_url
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.keys import Keys, is_name

#: Whoever presses the tabulator does not wait for a broker that is away.
MOST_S: Final = 0.5
#: These take folders and files where others take names.
_PROGRAMS: Final = frozenset({"up", "demo", "coordinator", "worker"})
Names = Callable[[redis.Redis, Keys], Iterable[str]]


def teach(command: click.Command) -> None:
    """Let a command propose names for those of its parameters that take any."""
    if isinstance(command, click.Group) and not isinstance(command, LazyGroup):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            if one := command.get_command(ctx, name):
                teach(one)
    if command.name not in _PROGRAMS:
        for param in command.params:
            names = _NAMES.get(param.name or "")
            if names and isinstance(param.type, StringParamType):
                param.type = _KnownName(names)


class _KnownName(StringParamType):
    """A text for which the yard knows names."""

    def __init__(self, names: Names) -> None:
        self._names = names

    def shell_complete(
        self, ctx: click.Context, _: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Those that begin so."""
        given = ctx.find_root().params
        names = _known(self._names, given)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _known(names: Names, given: Mapping[str, Any]) -> list[str]:
    """The names, where a broker says them in time; in a thread, for DNS knows no time-out."""
    yard = str(given.get("yard") or YARD_DEFAULT)
    url = str(given.get("redis_url") or running_url(yard))
    found: list[str] = []

    def ask() -> None:
        with (
            contextlib.suppress(TokenyardError, redis.RedisError, OSError),
            open_connection(
                url, timeout_s=MOST_S, connect_timeout_s=MOST_S, retries=0
            ) as connection,
        ):
            found.extend(sorted(set(names(connection, Keys(yard)))))

    if url and is_name(yard):
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(MOST_S)
    return list(found)


def _models(connection: redis.Redis, keys: Keys) -> list[str]:
    view = read_yard(connection, keys)
    return known_models(view, view.desired_states.by_scope)


def _workers(connection: redis.Redis, keys: Keys) -> list[str]:
    return [one.info.name for one in living(read_yard(connection, keys)) if one.info]


def _jobs(connection: redis.Redis, keys: Keys) -> list[str]:
    from tokenyard.batch.rq.jobs import BatchQueue

    return [job.id for job in BatchQueue(connection, keys.yard).all_jobs()]


#: By the name of the parameter, wherever it stands.
_NAMES: Final[Mapping[str, Names]] = {
    "model": _models,
    "worker": _workers,
    "job_id": _jobs,
    "after": _jobs,
}
