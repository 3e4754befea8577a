"""The tenants that wait, as rows of a table: `info` and `top`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tokenyard.protocol.texts import printable
from tokenyard.yard.line import InLine, TenantLine

LINE_COLUMNS: Final = ("Tenant in line", "Waiting", "Running", "Weight", "Wanted", "Had")
#: Requests that belong to no tenant share as one.
NO_TENANT: Final = "(no tenant)"


def line_rows(line: TenantLine, had: Mapping[str, float], most: int) -> list[Sequence[str]]:
    """A row for each tenant, the next one first; the last counts those beyond ``most``."""
    shown = line.tenants if len(line.tenants) <= most else line.tenants[: most - 1]
    rows: list[Sequence[str]] = [_row(one, line.wanted, had) for one in shown]
    if left := len(line.tenants) - len(shown):
        beyond = "" if line.is_whole else " at least"
        rows.append((f"and{beyond} {left:,} more", *[""] * (len(LINE_COLUMNS) - 1)))
    return rows


def _row(one: InLine, wanted: Mapping[str, float], had: Mapping[str, float]) -> Sequence[str]:
    return (
        printable(one.name) or NO_TENANT,
        f"{one.waiting:,}" if one.name else "-",
        f"{one.running:,}" if one.name else "-",
        f"{one.settings.weight:g}",
        percent(wanted.get(one.name)),
        percent(had.get(one.name)),
    )


def percent(share: float | None) -> str:
    """A share, if it is known."""
    return "-" if share is None else f"{share:.1%}"
