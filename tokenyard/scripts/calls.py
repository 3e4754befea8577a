"""One call of a script, and the text of the scripts."""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Generic, TypeVar

import redis
from redis.exceptions import NoPermissionError, NoScriptError

from tokenyard.protocol.errors import ScriptsMissing
from tokenyard.protocol.keys import Keys

Arg = bytes | str | int | float
T = TypeVar("T")
E = TypeVar("E", bound=enum.IntEnum)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One script call and how to read its answer; doing it is left to a connection."""

    script: str
    keys: Sequence[str]
    args: Sequence[Arg]
    read: Callable[[Any], T]


def command_of(call: Call[Any]) -> tuple[Arg, ...]:
    """The call as a command, for a server that has the script."""
    return ("EVALSHA", digest(call.script), len(call.keys), *call.keys, *call.args)


_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)


@functools.cache
def source(name: str) -> str:
    """Text of one script, its includes spliced in."""
    folder = resources.files("tokenyard") / "lua"
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(
        lambda found: (folder / "include" / f"{found[1]}.lua").read_text(encoding="utf-8"), text
    )


@functools.cache
def digest(name: str) -> str:
    """By which the server knows a script."""
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def codes(kind: type[E], answers: int | list[int], count: int) -> list[E]:
    """One code for each item; a single answer stands for all."""
    if isinstance(answers, int):
        return [kind(answers)] * count
    found = {answer: kind(answer) for answer in set(answers)}  # of very many they are few
    return [found[answer] for answer in answers]


def load_scripts(connection: redis.Redis) -> int:
    """Load the scripts that the server has not got, for those who may not; how many."""
    names = script_names()
    known: Any = connection.script_exists(*map(digest, names))
    missing = [name for name, is_there in zip(names, known, strict=True) if not is_there]
    for name in missing:
        connection.script_load(source(name))
    return len(missing)


#: So often is a script called again that the leader is to load.
MISSING_EVERY_S: Final = 0.05


@functools.cache
def script_names() -> tuple[str, ...]:
    """All scripts."""
    files = (resources.files("tokenyard") / "lua").iterdir()
    return tuple(sorted(file.name[:-4] for file in files if file.name.endswith(".lua")))


class Caller:
    """Calls scripts of one yard over one synchronous connection pool."""

    def __init__(
        self,
        connection: redis.Redis,
        keys: Keys,
        *,
        reply_maxlen: int = 10_000,
        dead_maxlen: int = 10_000,
    ) -> None:
        self.keys = keys
        self._connection = connection
        self._reply_maxlen = reply_maxlen
        self._dead_maxlen = dead_maxlen

    def call(self, call: Call[T]) -> T:
        """Make one call and read its answer."""
        return call.read(self._run(call.script, call.keys, call.args))

    def _run(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        run: Any = self._connection.execute_command  # redis-py gives no types for it
        command = ("EVALSHA", digest(script), len(keys), *keys, *args)
        try:
            return run(*command)
        except NoScriptError:
            try:
                run("SCRIPT LOAD", source(script))
            except NoPermissionError as error:
                raise ScriptsMissing(script) from error
            return run(*command)
