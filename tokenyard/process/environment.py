"""Environment variables with misspelt names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from tokenyard.broker.url import CREDENTIALS
from tokenyard.process.running import URL_VARIABLE, YARD_VARIABLE
from tokenyard.protocol.board_settings import BoardSettings
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.settings import CoordinatorSettings, WorkerSettings
from tokenyard.protocol.texts import nearest

_PREFIX: Final = "TOKENYARD_"
#: Prefix and settings of each program that reads its settings from variables.
_PROGRAMS: Final = {
    "coordinator": ("TOKENYARD_COORDINATOR_", CoordinatorSettings),
    "worker": ("TOKENYARD_WORKER_", WorkerSettings),
    "gateway": ("TOKENYARD_GATEWAY_", GatewaySettings),
    "board": ("TOKENYARD_BOARD_", BoardSettings),
}
#: Variables of all programs.
_COMMON: Final = (URL_VARIABLE, *CREDENTIALS, YARD_VARIABLE, "TOKENYARD_OPERATOR")
#: Least similarity of a name that has only our prefix in common.
_MIN_SIMILARITY: Final = 0.75
#: Variables that Tokenyard itself sets, for call-backs, worker processes and tests; and
#: `tokenyard.broker.url.BATCH_URL_VARIABLE`.
_OURS: Final = re.compile(r"TOKENYARD_(BATCH_\w+|OMP_NUM_THREADS|TEST_\w+)")
#: Variables that Kubernetes sets for a Service whose name begins with "tokenyard".
_OF_SERVICES: Final = re.compile(
    r"TOKENYARD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)\w*)?)"
)


def variables_of(program: str) -> list[str]:
    """The variables of one program."""
    prefix, settings = _PROGRAMS[program]
    fields = (field.name for field in dataclasses.fields(settings))
    return [f"{prefix}{name.upper()}" for name in fields if name not in {"redis_url", "yard"}]


def misspelt(environment: Mapping[str, str], programs: Collection[str] = ()) -> list[str]:
    """A message for each variable that is similar to one of ``programs``, or of all programs.

    Variables of other programs and of Kubernetes are ignored, and so are names without a similar
    one.
    """
    return [
        f"nothing reads the variable {name}; did you mean {near}?"
        for name in _unread(environment)
        if (near := _similar(name, programs))
    ]


def unknown(environment: Mapping[str, str], programs: Collection[str]) -> list[str]:
    """A message for each variable with the prefix of ``programs`` that is not similar to any."""
    prefixes = tuple(_PROGRAMS[program][0] for program in programs)
    return [
        f"nothing reads the variable {name}"
        for name in _unread(environment)
        if name.startswith(prefixes) and not _similar(name, programs)
    ]


def _similar(name: str, programs: Collection[str]) -> str:
    """The similar variable; prefixes do not count."""
    for program in programs:
        prefix = _PROGRAMS[program][0]
        if name.startswith(prefix):
            return _nearest_after(prefix, name, variables_of(program), 0.6)
    known = [*_COMMON, *(one for program in programs for one in variables_of(program))]
    return _nearest_after(_PREFIX, name, known, _MIN_SIMILARITY)


def _nearest_after(prefix: str, name: str, known: Iterable[str], likeness: float) -> str:
    rests = (one.removeprefix(prefix) for one in known)
    near = nearest(name.removeprefix(prefix), rests, likeness)
    return prefix + near if near else ""


def _unread(environment: Mapping[str, str]) -> Iterator[str]:
    """Variables with our prefix that no program reads."""
    known = {*_COMMON, *(name for program in _PROGRAMS for name in variables_of(program))}
    for name in sorted(environment):
        is_known = name in known or _OURS.fullmatch(name) or _OF_SERVICES.fullmatch(name)
        if name.startswith(_PREFIX) and not is_known:
            yield name
