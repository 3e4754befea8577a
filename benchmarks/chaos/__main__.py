"""Is any answer lost, duplicated, wrong or incomplete, whatever dies? A yard under load and faults.

The run starts its own broker, two coordinators, two controllers with workers, two gateways, and
clients of Redis and of HTTP.
The seed determines a random schedule of SIGKILL, SIGSTOP with SIGCONT, SIGTERM and restarts. At
the end all faults are repaired, and a checker reads all that the clients saw and all that the
broker ever wrote. The exit status is not 0 if an answer was lost, duplicated or wrong, if a stream
had gaps or repeats, or if the run tried too little to prove anything (`benchmarks.chaos.verdict`).

    python -m benchmarks.chaos --engine simulated --server valkey --seconds 60 --seed 7

The same seed gives the same schedule and requests; what a process is doing when a fault hits it
depends on the machine.
"""

from __future__ import annotations

import importlib.util
import re
import resource
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, get_args

import click
import msgspec

from benchmarks.chaos.accounts import Accounts, check_accounts, tenants_of_a_run
from benchmarks.chaos.answers import Answers
from benchmarks.chaos.check import History, Report, check, gather, report, timeline
from benchmarks.chaos.faults import FAST, SLOW, Part, Planned, schedule
from benchmarks.chaos.history import Event, HistoryWriter, read_history
from benchmarks.chaos.http_load import HttpLoadSettings
from benchmarks.chaos.injector import Injector
from benchmarks.chaos.load import LoadSettings
from benchmarks.chaos.plant import ADDER, DEFAULTS, Plant, Timing
from benchmarks.chaos.record import read_commands, record
from benchmarks.chaos.recovery import recoveries
from benchmarks.chaos.verdict import shortcomings
from benchmarks.measure import print_table
from benchmarks.progress import publish, tell
from benchmarks.yard import ServerName
from tokenyard.process.extras import why_no_gateway
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.settings import EngineName
from tokenyard.protocol.tenants import TenantSettings

CLIENTS: Final = 3
THREADS: Final = 24
LONG_THREADS: Final = 6
HTTP_THREADS: Final = 16
HTTP_LONG_THREADS: Final = 8
TENANTS: Final = 3
QUICK_S: Final = 6.0
#: Seconds from the last repair to the last answer.
PATIENCE_S: Final = 90.0
VLLM_PATIENCE_S: Final = 240.0
#: Mean pause of a thread between requests to vLLM, which answers immediately.
VLLM_PAUSE_S: Final = 0.4
_STALE_LINE: Final = re.compile(rb"belongs to another attempt|has lost its lease")
_SHOWN: Final = 5
#: Faults after which streams continue on another worker.
RECOVERIES: Final = (
    *("worker kill", "worker crash", "core kill", "core crash"),
    *("host kill", "controller kill"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The configuration of a run."""

    engine: EngineName
    server: ServerName
    seconds: float
    seed: int
    timing: Timing
    parts: Sequence[Part]
    has_gateways: bool
    tenants: Mapping[str, TenantSettings]
    folder: Path

    @property
    def pause_s(self) -> float:
        """Mean time between two requests of a client's thread."""
        return 0.0 if self.engine == "simulated" else VLLM_PAUSE_S

    def schedule(self) -> list[Planned]:
        """The schedule of faults, determined by the seed."""
        pace = FAST if self.engine == "simulated" else SLOW
        return schedule(self.seed, self.seconds, pace, self.parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run."""

    report: Report
    history: History
    stale_refused: int
    left_over: int
    accounts: Accounts
    recovery_s: dict[str, list[float]]  # by kind of fault
    shortcomings: list[str]  # what the run did not try, in words

    @property
    def is_clean(self) -> bool:
        """Whether everything was tried, and no promise was broken."""
        return not self.report.violations and not self.shortcomings

    def summary(self, seed: int) -> dict[str, Any]:
        """The figures for ``--json``."""
        found = self.report
        recovery = self.recovery_s["worker kill"]
        return {
            "seed": seed,
            "accepted": found.accepted,
            "results": found.results,
            "lost": found.count("lost"),
            "twice": found.count("twice"),
            "wrong": found.count("wrong"),
            "wrong_status": found.count("status"),
            "gaps": found.count("gap", "repeat"),
            "wrong_tenant": found.count("tenant"),
            "wrong_counts": found.count("count"),
            "of_tenants": found.of_tenants,
            "of_tenants_over_http": found.of_tenants_over_http,
            "charged_again": found.charged_again,
            "stale_refused": self.stale_refused,
            "kills": found.kills.total(),
            "missed": len(self.history.missed),
            "entries_lost": found.entries_lost,
            "over_http": found.over_http,
            "resumed": found.resumed,
            "hinted": found.hinted,
            "recovery_p50_s": round(statistics.median(recovery), 3) if recovery else None,
            "recovery_max_s": round(max(recovery), 3) if recovery else None,
            "kills_by_kind": dict(sorted(found.kills.items())),
            "shortcomings": self.shortcomings,
        }


def perform(run: Run) -> Outcome:
    """Execute a run and judge it."""
    yard = f"chaos-{secrets.token_hex(4)}"
    plant = Plant(
        run.server,
        run.engine,
        yard,
        run.folder,
        run.timing,
        has_gateways=run.has_gateways,
        tenants=run.tenants,
    )
    began = time.monotonic()
    try:
        plant.start()
        tell(f"the yard serves after {time.monotonic() - began:.0f} s")
        play(run, plant)
        tell(f"all is over after {time.monotonic() - began:.0f} s")
        accounts = plant.accounts()
        left_over = plant.left_over()
    finally:
        plant.stop()
    history = gather(events(run.folder, plant))
    violations = check(history, Answers(run.engine))
    violations += check_accounts(history, accounts, run.tenants)
    return Outcome(
        report(history, violations),
        history,
        stale_refused(plant.logs),
        left_over,
        accounts,
        {
            kind: [one for found in recoveries(history, kind) for one in found.seconds]
            for kind in RECOVERIES
        },
        list(shortcomings(run.schedule(), history, run.seconds, run.parts, run.tenants)),
    )


def play(run: Run, plant: Plant) -> None:
    """Apply load and faults together, then wait until all requests are answered."""
    stop = run.folder / "stop"
    plant.start_clients(client_commands(run, plant, stop))
    plant.wait_for_tokens()
    history = HistoryWriter(run.folder / "faults.jsonl")
    Injector(plant, history).play(run.schedule())
    stop.touch()
    history.close()
    patience_s = PATIENCE_S if run.engine == "simulated" else VLLM_PATIENCE_S
    until = time.monotonic() + patience_s
    for client in plant.clients:
        # The checker reports requests that are still unanswered then as lost.
        client.wait(max(0.0, until - time.monotonic()))


def client_commands(run: Run, plant: Plant, stop: Path) -> Iterator[list[str]]:
    """Command lines of the client processes, which run until the file ``stop`` exists."""
    for number in range(CLIENTS):
        settings = LoadSettings(
            url=plant.broker.url,
            yard=plant.yard,
            engine=run.engine,
            client=f"client-{number}",
            seed=run.seed,
            stop=str(stop),
            threads=THREADS,
            long_threads=LONG_THREADS,
            pause_s=run.pause_s,
            history=str(run.folder / f"client-{number}.jsonl"),
            tenants=["", *run.tenants],
        )
        yield command("benchmarks.chaos.load", settings)
    if run.has_gateways:
        over_http = HttpLoadSettings(
            ports=plant.ports,
            api_keys=plant.api_keys,
            model=ADDER.name,
            engine=run.engine,
            name="http-client",
            seed=run.seed,
            stop=str(stop),
            threads=HTTP_THREADS,
            long_threads=HTTP_LONG_THREADS,
            pause_s=run.pause_s,
            history=str(run.folder / "http-client.jsonl"),
        )
        yield command("benchmarks.chaos.http_load", over_http)


def command(module: str, settings: msgspec.Struct) -> list[str]:
    """The command line of a client."""
    return [sys.executable, "-m", module, msgspec.json.encode(settings).decode()]


def events(folder: Path, plant: Plant) -> Iterator[Event]:
    """All recorded events."""
    written = read_history(sorted(folder.glob("*.jsonl")))
    return chain(written, record(read_commands(plant.broker.data_dir), Keys(plant.yard)))


def stale_refused(logs: Path) -> int:
    """Number of refused writes that the workers logged."""
    files = logs.glob("host-*.log")
    return sum(len(_STALE_LINE.findall(file.read_bytes())) for file in files)


def print_outcome(run: Run, outcome: Outcome) -> None:
    """Print the table."""
    found = outcome.report
    rows: list[tuple[str, object]] = [
        ("accepted", found.accepted),
        ("  over HTTP", found.over_http),
        ("  of tenants", found.of_tenants),
        ("    over HTTP", found.of_tenants_over_http),
        ("    charged more than once", found.charged_again),
        ("results", found.results),
        ("  cancelled among them", found.cancelled),
        ("  of deleted entries", found.entries_lost),
        ("lost", found.count("lost")),
        ("answered twice", found.count("twice")),
        ("wrong answers", found.count("wrong")),
        ("token gaps", found.count("gap")),
        ("token repeats", found.count("repeat")),
        ("wrong HTTP statuses", found.count("status")),
        ("with a wrong tenant", found.count("tenant")),
        ("tenants with wrong counts", found.count("count")),
        ("streams over HTTP continued", found.resumed),
        ("  after the hint of a stopped gateway", found.hinted),
        ("stale writes refused", outcome.stale_refused),
        ("left over in intakes and lanes", outcome.left_over),
        ("faults", found.kills.total()),
        ("  without a target", len(outcome.history.missed)),
        *((f"  {kind}", count) for kind, count in sorted(found.kills.items())),
    ]
    for kind, seconds in outcome.recovery_s.items():
        if seconds:
            p50, worst = statistics.median(seconds), max(seconds)
            rows.append((f"recovery after {kind}, p50 s", p50))
            rows.append((f"recovery after {kind}, max s", worst))
    title = f"{run.engine} on {run.server}, {run.seconds:g} s, seed {run.seed}"
    print_table(title, ["", "count"], rows)


def print_violations(outcome: Outcome) -> None:
    """Print the first offending requests, each with its timeline."""
    shown: dict[tuple[str, str], list[str]] = {}
    for violation in outcome.report.violations:
        shown.setdefault(violation.key, []).append(f"{violation.kind}: {violation.what}")
    for key, lines in list(shown.items())[:_SHOWN]:
        click.echo(f"\n{'/'.join(key)}", err=True)
        for line in chain(lines, timeline(outcome.history.stories[key])):
            click.echo(f"  {line}", err=True)


@click.command(help="Break a yard under load, by a random schedule, and check what came out.")
@click.option("--engine", type=click.Choice(["simulated", "vllm"]), default="simulated")
@click.option("--server", type=click.Choice(["valkey", "redis"]), default="valkey")
@click.option("--seconds", type=click.FloatRange(1, 3600), default=60.0, show_default=True)
@click.option("--seed", type=int, help="Of schedule and load.  [default: a random one]")
@click.option(
    "--only",
    "parts",
    type=click.Choice(get_args(Part)),
    multiple=True,
    help="Break only these.",
)
@click.option(
    "--http/--no-http",
    "has_gateways",
    default=None,
    help="A load over HTTP, too, and two gateways.  [default: where the gateway's extra is]",
)
@click.option(
    "--tenants",
    "tenants",
    type=click.IntRange(0, 1000),
    default=TENANTS,
    show_default=True,
    help="Each with a key of the gateways, which then need one; other requests have no tenant.",
)
@click.option("--default-timing", is_flag=True, help="Leases as by default, not short ones.")
@click.option("--keep", is_flag=True, help="Keep history and logs of a clean run, too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
@click.option("--quick", is_flag=True, help=f"Under a minute: {QUICK_S:g} s of faults.")
def main(
    engine: EngineName,
    server: ServerName,
    seconds: float,
    seed: int | None,
    parts: tuple[Part, ...],
    *,
    has_gateways: bool | None,
    tenants: int,
    default_timing: bool,
    keep: bool,
    as_json: bool,
    quick: bool,
) -> None:
    """Run and print the outcome; the exit status is the verdict."""
    if has_gateways is None:
        has_gateways = bool(importlib.util.find_spec("uvicorn")) and not why_no_gateway()
    if "gateway" in parts and not has_gateways:
        raise click.UsageError("--only gateway needs --http")
    if "core" in parts and engine == "simulated":
        raise click.UsageError("--only core needs --engine vllm")
    absent = {"gateway": not has_gateways, "core": engine == "simulated"}
    run = Run(
        engine=engine,
        server=server,
        seconds=QUICK_S if quick else seconds,
        seed=secrets.randbelow(10**6) if seed is None else seed,
        timing=DEFAULTS if default_timing else Timing(),
        parts=parts or [one for one in get_args(Part) if not absent.get(one)],
        has_gateways=has_gateways,
        tenants=tenants_of_a_run(tenants),
        folder=Path(tempfile.mkdtemp(prefix="tokenyard-chaos-")),
    )
    # Otherwise each worker that crashes on purpose leaves a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    click.echo(f"seed {run.seed}", err=True)
    outcome = perform(run)
    publish(outcome.summary(run.seed), lambda: print_outcome(run, outcome), as_json=as_json)
    if outcome.is_clean and not keep:
        shutil.rmtree(run.folder)
    else:
        click.echo(f"history and logs: {run.folder}", err=True)
    print_violations(outcome)
    for reason in outcome.shortcomings:
        click.echo(f"failed: {reason}", err=True)
    sys.exit(not outcome.is_clean)


if __name__ == "__main__":
    main()
