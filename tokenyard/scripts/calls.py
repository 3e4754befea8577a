"""Calls of scripts, and the sources of the scripts."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Generic, TypeVar

import redis
from redis.exceptions import NoPermissionError, NoScriptError

from tokenyard import clock
from tokenyard.protocol.errors import ScriptsMissing
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.wire import Refused, ReplyKind, Request

Arg = bytes | str | int | float
T = TypeVar("T")
#: The answer to a former leader, whose token a script has compared.
NOT_LEADER: Final = -1


class LostLeadership(Exception):
    """Another coordinator leads."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One script call and how to read its answer; a connection carries it out."""

    script: str
    keys: Sequence[str]
    args: Sequence[Arg]
    read: Callable[[Any], T]


def command_of(call: Call[Any]) -> tuple[Arg, ...]:
    """The call as a command, for a server that has the script loaded."""
    return _command(call.script, call.keys, call.args)


def _command(script: str, keys: Sequence[str], args: Sequence[Arg]) -> tuple[Arg, ...]:
    """A call with one key more, which never exists.

    While a slot of a Redis Cluster is being moved, a script would stop at the first key that is at
    the other node, half done. Because of this key both nodes refuse it whole (TRYAGAIN, or ASK).
    """
    never = f"{keys[0].partition('}')[0]}}}:never"
    return ("EVALSHA", digest(script), len(keys) + 1, *keys, never, *args)


#: Begins every script: the rest of it knows nothing of that key.
_WITHOUT_NEVER: Final = """\
if not table.remove(KEYS):find('}:never$') then
  return redis.error_reply('ERR the last of KEYS must be <yard>:never, see docs/protocol.md')
end
"""
_FIRST_LINE: Final = re.compile(r"\A(#!.*\n)?")
_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)


@functools.cache
def source(name: str) -> str:
    """The text of a script with its includes, and theirs, each once."""
    folder = resources.files("tokenyard") / "scripts" / "lua"
    included: set[str] = set()

    def read(path: str) -> str:
        return _INCLUDE.sub(splice, (folder / path).read_text(encoding="utf-8"))

    def splice(found: re.Match[str]) -> str:
        if found[1] in included:
            return ""
        included.add(found[1])
        return read(f"include/{found[1]}.lua")

    return _FIRST_LINE.sub(lambda found: found[0] + _WITHOUT_NEVER, read(f"{name}.lua"))


@functools.cache
def digest(name: str) -> str:
    """The server's id of a script."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def codes(kind: Callable[[int], T], answers: int | list[int], count: int) -> list[T]:
    """One code, or yes or no, for each item; a single answer applies to all."""
    if isinstance(answers, int):
        return [kind(answers)] * count
    found = {answer: kind(answer) for answer in set(answers)}  # few distinct ones among many
    return [found[answer] for answer in answers]


def load_scripts(connection: redis.Redis) -> int:
    """Load missing scripts, for users without the permission; returns their number."""
    names = script_names()
    known: Any = connection.script_exists(*map(digest, names))
    missing = [name for name, is_there in zip(names, known, strict=True) if not is_there]
    for name in missing:
        connection.script_load(source(name))
    return len(missing)


#: Pause between calls of a missing script, until the leader loads it.
MISSING_EVERY_S: Final = 0.05


async def run_async(connection: Any, call: Call[Any], wait_s: float) -> Any:
    """Make a call over an asynchronous connection; its raw answer.

    Waits up to ``wait_s`` for a script that only the leader may load; raises `ScriptsMissing`.
    """
    give_up = clock.monotonic() + wait_s
    command = command_of(call)
    while True:
        try:
            return await connection.execute_command(*command)
        except NoScriptError:
            try:
                await connection.execute_command("SCRIPT LOAD", source(call.script))
            except NoPermissionError as error:
                if clock.monotonic() >= give_up:
                    raise ScriptsMissing(call.script) from error
                await clock.pause(MISSING_EVERY_S)


@functools.cache
def script_names() -> tuple[str, ...]:
    """All scripts."""
    files = (resources.files("tokenyard") / "scripts" / "lua").iterdir()
    return tuple(sorted(file.name[:-4] for file in files if file.name.endswith(".lua")))


def destination(keys: Keys, request: Request | Refused) -> tuple[str, ReplyKind]:
    """The stream that a request's replies go to, and their form: packed frames or plain entries."""
    if request.reply_to:
        return f"{keys.prefix}{request.reply_to}", "frame"
    return keys.reply(request.client, request.id), "flat"


class Caller:
    """Calls scripts of one yard over one synchronous connection pool."""

    def __init__(
        self, yard: Yard, *, reply_maxlen: int = 10_000, dead_maxlen: int = 10_000
    ) -> None:
        self.keys = yard.keys
        self.yard = yard
        self._reply_maxlen = reply_maxlen
        self._dead_maxlen = dead_maxlen

    def call(self, call: Call[T]) -> T:
        """Make one call and read its answer."""
        return call.read(self._run(call.script, call.keys, call.args))

    def _run_as_leader(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        """Run a script that compares the leader's token; raises `LostLeadership`."""
        answer = self._run(script, keys, args)
        if answer == NOT_LEADER:
            raise LostLeadership
        return answer

    def _run(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        run: Any = self.yard.connection.execute_command  # redis-py gives no types for it
        command = _command(script, keys, args)
        try:
            return run(*command)
        except NoScriptError:
            try:
                run("SCRIPT LOAD", source(script))
            except NoPermissionError as error:
                raise ScriptsMissing(script) from error
            return run(*command)
