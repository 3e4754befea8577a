"""`tokenyard completion`, and completed names: models, workers, batch jobs, tenants."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from tokenyard.cli.shared.console import say
from tokenyard.process.program import PlainCommand
from tokenyard.process.running import YARD_DEFAULT, broker_url
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.keys import Keys, Yard, is_name

#: Set by the shell while it completes a line.
COMPLETION: Final = "_TOKENYARD_COMPLETE"
#: The shell does not wait longer for an unreachable broker.
MAX_WAIT_S: Final = 0.5
_SHELLS: Final = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
Names = Callable[[Yard], Iterable[str]]
Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def _known(names: Names, options: Mapping[str, Any]) -> list[str]:
    """The names, if a broker reports them in time; in a thread, because DNS has no time-out."""
    import redis

    from tokenyard.broker.connection import open_connection

    yard = str(options.get("yard") or YARD_DEFAULT)
    url = broker_url(options.get("redis_url"), yard)
    found: list[str] = []

    def ask() -> None:
        with (
            contextlib.suppress(TokenyardError, redis.RedisError, OSError),
            open_connection(
                url, timeout_s=MAX_WAIT_S, connect_timeout_s=MAX_WAIT_S, retries=0
            ) as connection,
        ):
            found.extend(sorted(set(names(Yard(connection, Keys(yard), url)))))

    if url and is_name(yard):
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(MAX_WAIT_S)
    return list(found)


def _models() -> Names:
    from tokenyard.yard.pauses import known_models
    from tokenyard.yard.snapshot import read_roster

    return lambda yard: known_models(read_roster(yard))


def _workers() -> Names:
    from tokenyard.yard.snapshot import read_roster

    return lambda yard: [info.name for info in read_roster(yard).live.values()]


def _jobs() -> Names:
    from tokenyard.batch.rq.jobs import BatchQueue
    from tokenyard.batch.rq.listing import list_jobs

    def names(yard: Yard) -> Iterable[str]:
        jobs = list_jobs(BatchQueue(yard.connection, yard.keys.yard)).jobs
        return [job.batch.id for job in jobs]

    return names


def _tenants() -> Names:
    from tokenyard.yard.tenants import read_tenants

    return lambda yard: [one.name for one in read_tenants(yard)]


def _completing(load: Callable[[], Names]) -> Complete:
    """``load`` imports what is needed, for which a busy machine may need longer."""

    def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        known = _known(load(), ctx.find_root().params)
        return [name for name in known if name.startswith(incomplete)]

    return complete


#: By what the name is of.
COMPLETE: Final[Mapping[str, Complete]] = {
    "model": _completing(_models),
    "worker": _completing(_workers),
    "tenant": _completing(_tenants),
    "batch": _completing(_jobs),
}


@click.command(cls=PlainCommand, short_help="Print a script for shell completion.")
@click.argument("shell", metavar="SHELL", type=click.Choice([*_SHELLS]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script with which the shell completes commands, options and names.

    Names of models, workers and batch jobs come from the broker, if it answers within half a
    second. Options before the command count: `tokenyard --yard test pause --model <TAB>`.

    Examples:
      eval "$(tokenyard completion bash)"                        now
      tokenyard completion bash > ~/.local/share/bash-completion/completions/tokenyard
      tokenyard completion zsh > ~/.zfunc/_tokenyard             with fpath+=~/.zfunc
      tokenyard completion fish > ~/.config/fish/completions/tokenyard.fish
    """
    root = ctx.find_root().command
    say(_SHELLS[shell](root, {}, "tokenyard", COMPLETION).source())
