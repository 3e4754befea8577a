"""Variables that nobody reads because their names are misspelt."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from tokenyard.process.running import URL_VARIABLE, YARD_VARIABLE
from tokenyard.protocol.settings import CoordinatorSettings, WorkerSettings
from tokenyard.protocol.wording import nearest

_PREFIX: Final = "TOKENYARD_"
#: Prefix and settings of each program that reads its settings from variables.
_PROGRAMS: Final = {
    "coordinator": ("TOKENYARD_COORDINATOR_", CoordinatorSettings),
    "worker": ("TOKENYARD_WORKER_", WorkerSettings),
}
#: Those of all programs.
_COMMON: Final = (URL_VARIABLE, YARD_VARIABLE, "TOKENYARD_OPERATOR")
#: How much a name must look like another where nothing but our prefix is the same.
_ALIKE: Final = 0.75
#: What we set ourselves, for call-backs, worker processes and tests.
_OURS: Final = re.compile(r"TOKENYARD_(BATCH_\w+|OMP_NUM_THREADS|TEST_\w+)")
#: What Kubernetes sets in each container for a Service whose name begins with "tokenyard".
_OF_SERVICES: Final = re.compile(
    r"TOKENYARD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)\w*)?)"
)


def variables_of(program: str) -> list[str]:
    """The variables that a program reads beside the common ones."""
    prefix, settings = _PROGRAMS[program]
    fields = (field.name for field in dataclasses.fields(settings))
    return [f"{prefix}{name.upper()}" for name in fields if name not in {"redis_url", "yard"}]


def misspelt(environment: Mapping[str, str], programs: Collection[str] = ()) -> list[str]:
    """A sentence for each variable that is likely to be meant for ``programs``, or for all.

    Variables of other programs, of Kubernetes' Services, and what looks like nothing that is
    known, are none of our business.
    """
    return [
        f"nothing reads the variable {name}; did you mean {near}?"
        for name in _questionable(environment)
        if (near := _meant(name, programs))
    ]


def unknown(environment: Mapping[str, str], programs: Collection[str]) -> list[str]:
    """A sentence for each variable that begins like the settings of ``programs`` and is none."""
    prefixes = tuple(_PROGRAMS[program][0] for program in programs)
    return [
        f"nothing reads the variable {name}"
        for name in _questionable(environment)
        if name.startswith(prefixes) and not _meant(name, programs)
    ]


def _meant(name: str, programs: Collection[str]) -> str:
    """The variable that is likely to be meant; what all begin with counts for nothing."""
    for program in programs:
        prefix = _PROGRAMS[program][0]
        if name.startswith(prefix):
            return _nearest_behind(prefix, name, variables_of(program), 0.6)
    known = [*_COMMON, *(one for program in programs for one in variables_of(program))]
    return _nearest_behind(_PREFIX, name, known, _ALIKE)


def _nearest_behind(prefix: str, name: str, known: Iterable[str], likeness: float) -> str:
    rests = (one.removeprefix(prefix) for one in known)
    near = nearest(name.removeprefix(prefix), rests, likeness)
    return prefix + near if near else ""


def _questionable(environment: Mapping[str, str]) -> Iterator[str]:
    """Variables with our prefix that no program reads."""
    known = {*_COMMON, *(name for program in _PROGRAMS for name in variables_of(program))}
    for name in sorted(environment):
        is_known = name in known or _OURS.fullmatch(name) or _OF_SERVICES.fullmatch(name)
        if name.startswith(_PREFIX) and not is_known:
            yield name
