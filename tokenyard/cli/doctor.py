"""`tokenyard doctor`: checks a yard and its broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import click
import msgspec
from rich.table import Table
from rich.text import Text

from tokenyard.cli.shared.connect import opened
from tokenyard.cli.shared.console import plain_console, say
from tokenyard.doctor import diagnose
from tokenyard.doctor.evidence import Finding, Verdict, gather
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.protocol.texts import counted

_STYLES: Final[dict[Verdict, str]] = {
    "ok": "green",
    "warning": "yellow",
    "fault": "bold red",
    "unknown": "dim",
}


@click.command(cls=PlainCommand, short_help="Check a yard and its broker.")
@click.option("--all", "shows_all", is_flag=True, help="Also show what is in order.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each finding.")
@click.pass_context
def doctor(ctx: click.Context, shows_all: bool, as_json: bool) -> None:
    """Check a yard and its broker, and print a remedy for each problem.

    It reads and changes nothing: version, eviction, AOF, memory by kind of key, disk, replicas,
    users, time-outs, clocks; coordinator, workers, versions, models, pauses, leases, lanes,
    consumer groups, dead letters, tenants. A check that the broker or our user does not allow is
    "unknown", which is not a fault: managed servers refuse CONFIG.

    Examples:
      tokenyard doctor
      tokenyard doctor --all
      tokenyard --redis-url redis://admin:secret@broker:6379 doctor --json | jq -r .name

    Exit statuses:
      0  no fault; there may be warnings      1  at least one fault
      3  no broker
    """
    choice: YardChoice = ctx.obj
    with opened(choice) as yard:
        findings = list(diagnose(gather(yard)))
    if as_json:
        for finding in findings:
            say(msgspec.json.encode(finding))
    else:
        _print(findings, shows_all=shows_all)
    has_fault = any(finding.verdict == "fault" for finding in findings)
    ctx.exit(Exit.FAILED if has_fault else Exit.OK)


def _print(findings: Sequence[Finding], *, shows_all: bool) -> None:
    shown = [one for one in findings if shows_all or one.verdict != "ok"]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in shown:
        table.add_row(Text(one.verdict, style=_STYLES[one.verdict]), one.name, one.found)
        if one.todo:
            table.add_row("", "", Text(f"> {one.todo}", style="italic"))
    if shown:
        plain_console().print(table)
    counts = Counter(one.verdict for one in findings)
    say(
        f"{counted(counts['fault'], 'fault')}, {counted(counts['warning'], 'warning')},"
        f" {counts['ok']} ok, {counts['unknown']} unknown"
    )
