"""One call of a script, and the text of the scripts."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Generic, TypeVar

import redis

from tokenyard.keys import Keys

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


_INCLUDE = re.compile(r"^-- @include (\w+)\n", re.MULTILINE)


@functools.cache
def source(name: str) -> str:
    """Text of one script, its includes spliced in."""
    folder = resources.files("tokenyard") / "lua"
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(
        lambda found: (folder / "include" / f"{found[1]}.lua").read_text(encoding="utf-8"), text
    )


def codes(kind: type[E], answers: int | list[int], count: int) -> list[E]:
    """One code for each item; a single answer stands for all."""
    if isinstance(answers, int):
        return [kind(answers)] * count
    return [kind(answer) for answer in answers]


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
        self._script = functools.cache(lambda name: connection.register_script(source(name)))

    def call(self, call: Call[T]) -> T:
        """Make one call and read its answer."""
        return call.read(self._run(call.script, call.keys, call.args))

    def _run(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> Any:
        return self._script(script)(keys=keys, args=args)
