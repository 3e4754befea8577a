# noqa: INP001 (a script beside the model that it checks, in no package)
"""Checks the models with Spin: ``python docs/model/check.py``.

Needs `spin` and `gcc`. Without arguments it makes the everyday runs: the models in small bounds,
each to be found without error, and its broken variants, each to be found broken. Names choose
single runs, ``--deep`` adds the wide bounds, ``--trails`` prints the counterexamples, ``--json``
prints all that is known of each run, one object a line. Exits with 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
MOST_MB: Final = 6000
LIMIT_S: Final = 900

#: One request whose workers and coordinators fail once each: small, and everything happens.
SMALL: Final = ("INCARNATIONS=2", "FAULTS=1")
TENANTS: Final = ("MOVES=2", "ATTEMPTS=2")
SUSPECTS: Final = "suspects.pml"
TWO: Final = ("REQUESTS=2", "ATTEMPTS=2", "TOKENS=1", "TERMS=1", *SMALL)


@dataclass(frozen=True)
class Run:
    """One search: what is defined in the model, and whether Spin must find it sound."""

    name: str
    defines: tuple[str, ...]
    is_sound: bool = True
    #: Searched for states without end instead: a run of the protocol that never comes to rest.
    is_for_cycles: bool = False
    is_deep: bool = False
    model: str = "protocol.pml"

    @property
    def compiled(self) -> tuple[str, ...]:
        """Options for the C compiler. A broken variant is searched for its shortest trail."""
        if self.is_for_cycles:
            return ("-DNP",)
        if not self.is_sound:
            return ("-DSAFETY", "-DBFS")
        return ("-DSAFETY", "-DCOLLAPSE") if self.is_deep else ("-DSAFETY",)


RUNS: Final = (
    Run("repetition", SMALL),
    Run("faults", ("ADDS=1",)),
    Run("two-requests", ("ADDS=1", *TWO)),
    Run("trimmed", ("TRIMS=1", *SMALL)),
    Run("tenants", (*TENANTS, *SMALL)),
    Run("rest", SMALL, is_for_cycles=True),
    Run("deep", (), is_deep=True),
    Run("deep-two-requests", TWO, is_deep=True),
    Run("deep-rest", ("ADDS=1",), is_for_cycles=True, is_deep=True),
    Run("no-epoch", ("NO_EPOCH", "ADDS=1"), is_deep=True),
    Run("no-fence", ("NO_FENCE", *SMALL), is_sound=False),
    Run("no-fence-by-readers", ("NO_FENCE", "BY_READERS", "SOUND_ENGINES", *SMALL), is_sound=False),
    Run("no-seq", ("NO_SEQ", *SMALL), is_sound=False),
    Run("two-step", ("TWO_STEP", *SMALL), is_sound=False),
    Run("hasty", ("HASTY", *SMALL), is_sound=False),
    Run("no-dedupe", ("NO_DEDUPE", *SMALL), is_sound=False),
    Run("no-tokens", ("NO_TOKENS", *SMALL), is_sound=False),
    Run("no-search", ("TRIMS=1", "NO_SEARCH", *SMALL), is_sound=False),
    Run("two-looks", ("TRIMS=1", "TWO_LOOKS", *SMALL), is_sound=False),
    Run("old-place", ("OLD_PLACE", *TENANTS, *SMALL), is_sound=False),
    Run("suspects", (), model=SUSPECTS),
    Run("suspects-two", ("POISONS=2",), model=SUSPECTS),
    Run("suspects-rest", (), is_for_cycles=True, model=SUSPECTS),
    Run("in-company", ("IN_COMPANY",), is_sound=False, model=SUSPECTS),
    Run("one-crash", ("ONE_CRASH",), is_sound=False, model=SUSPECTS),
    Run("crowded", ("CROWDED",), is_sound=False, model=SUSPECTS),
    Run("no-split", ("NO_SPLIT",), is_sound=False, is_for_cycles=True, model=SUSPECTS),
)


@dataclass(frozen=True)
class Found:
    """What Spin printed of one search."""

    name: str
    is_sound: bool
    errors: int
    is_complete: bool
    states: int
    transitions: int
    depth: int
    seconds: float
    memory_mb: float
    #: Steps that the search never came to, by what they would have said.
    unreached: tuple[str, ...]
    #: The counterexample, a line a step, if there is one.
    trail: tuple[str, ...]

    @property
    def is_as_expected(self) -> bool:
        """Sound and searched to the end, or broken and caught."""
        return self.errors == 0 and self.is_complete if self.is_sound else self.errors > 0


def search(run: Run) -> Found:
    """Make one search in a folder of its own. Exits, saying what it said, if a tool fails."""
    defines = [f"-D{each}" for each in run.defines]
    if not run.is_sound:
        defines.append("-DSHORTEST")
    with tempfile.TemporaryDirectory(prefix="tokenyard-model-") as folder:
        spin = ["spin", *defines]
        _call([*spin, "-a", str(HERE / run.model)], folder)
        optimised = "-O2" if run.is_sound else "-O1"  # short searches compile longer than they run
        # No warnings: the C is Spin's affair.
        gcc = ["gcc", "-w", optimised, f"-DMEMLIM={MOST_MB}"]
        _call([*gcc, *run.compiled, "-o", "pan", "pan.c"], folder)
        options = ["-l"] if run.is_for_cycles else []
        printed = _call(["./pan", "-m100000", "-w25", *options], folder)
        trails = list(Path(folder).glob("*.trail"))
        told = (
            _call([*spin, "-T", "-k", trails[0].name, str(HERE / run.model)], folder)
            if trails
            else ""
        )
    return _read(run, printed, told)


def _call(command: list[str], folder: str) -> str:
    done = subprocess.run(
        command, cwd=folder, check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _read(run: Run, printed: str, told: str) -> Found:
    def number(pattern: str) -> float:
        found = re.search(pattern, printed)
        return float(found[1]) if found else 0.0

    unreached = re.findall(r'\.pml:\d+, state \d+, "printf\(\'(.*?)\'', printed)
    return Found(
        run.name,
        run.is_sound,
        errors=int(number(r"errors: (\d+)")) if "errors:" in printed else -1,
        is_complete="not completed" not in printed and "too small" not in printed,
        states=int(number(r"(\S+) states, stored")),
        transitions=int(number(r"(\S+) transitions")),
        depth=int(number(r"depth reached (\d+)")),
        seconds=number(r"elapsed time (\S+) seconds"),
        memory_mb=number(r"(\S+)\s+total actual memory usage"),
        unreached=tuple(text.removesuffix("\\n") for text in unreached),
        trail=tuple(told.partition("spin: ")[0].splitlines()),
    )


def main() -> int:
    """Make the chosen runs and print a table; 0 if all came out as they must."""
    parser = argparse.ArgumentParser(description="Check the model of the protocol with Spin.")
    parser.add_argument("names", nargs="*", metavar="run", help="these runs only")
    parser.add_argument("--deep", action="store_true", help="the wide bounds, too (minutes)")
    parser.add_argument("--trails", action="store_true", help="print the counterexamples")
    parser.add_argument("--json", action="store_true", help="one JSON object for each run")
    chosen = parser.parse_args()
    known = [run.name for run in RUNS]
    if unknown := sorted(set(chosen.names) - set(known)):
        parser.error(f"no such run: {', '.join(unknown)}; there are {', '.join(known)}")
    missing = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    if missing:
        sys.exit(f"not installed: {' '.join(missing)} (Debian: apt install spin gcc libc6-dev)")

    is_as_expected = True
    head = ("run", "errors", "states", "transitions", "depth", "s", "MB")
    if not chosen.json:
        _say("{:<20}{:>7}{:>12}{:>13}{:>7}{:>8}{:>7}".format(*head))
    for run in RUNS:
        if run.name in chosen.names if chosen.names else chosen.deep or not run.is_deep:
            found = search(run)
            is_as_expected &= found.is_as_expected
            _show(found, chosen.json, chosen.trails or not found.is_as_expected)
    return 0 if is_as_expected else 1


def _show(found: Found, as_json: bool, with_trail: bool) -> None:
    if as_json:
        _say(json.dumps(dataclasses.asdict(found)))
        return
    verdict = "" if found.is_as_expected else "  NOT AS IT MUST BE"
    _say(
        f"{found.name:<20}{found.errors:>7}{found.states:>12,}{found.transitions:>13,}"
        f"{found.depth:>7}{found.seconds:>8.1f}{found.memory_mb:>7.0f}{verdict}"
    )
    if with_trail:
        _say("".join(f"    {line}\n" for line in found.trail))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
