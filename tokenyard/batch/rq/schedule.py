"""Scheduled batch jobs: when the next one is due, and the names of its files.

RQ's cron scheduler stores its jobs with pickle, so each job enqueues its successor instead, with
`Queue.enqueue_at`. File names may have placeholders of `strftime`, like ``out-%Y-%m-%d.jsonl``.
"""

from __future__ import annotations

import datetime
import itertools
from typing import Final

import msgspec
from croniter import CroniterBadCronError, croniter

from tokenyard import clock
from tokenyard.batch.state import BatchSpec
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.texts import span_ms

#: So many jobs of a new schedule must have names of their own.
_NAMES: Final = 100


def now() -> datetime.datetime:
    """The local time."""
    return datetime.datetime.fromtimestamp(clock.wall()).astimezone()


def _local(shown: datetime.datetime) -> datetime.datetime:
    """The time that a clock shows here; one that it passes over is an hour later."""
    return datetime.datetime.fromtimestamp(shown.timestamp()).astimezone()


def next_time(cron: str, after: datetime.datetime | None = None) -> datetime.datetime:
    """When a schedule is due next, in this machine's time zone; raises `SettingsError`.

    By the clock on the wall, whatever its offset then. A time that the clock shows twice is due at
    the first, and one that it passes over is due an hour later.
    """
    after = after or now()
    try:
        shown = croniter(cron, after.astimezone().replace(tzinfo=None))
        while (due := _local(shown.get_next(datetime.datetime))) <= after:
            pass
    except (CroniterBadCronError, ValueError, KeyError) as error:
        raise SettingsError([f"cron {cron!r}: {error}; write it like '0 2 * * *'"]) from error
    return due


def first_spec(spec: BatchSpec, cron: str) -> tuple[datetime.datetime, BatchSpec]:
    """When the first job of a schedule is due, and the job.

    Raises `SettingsError` for a schedule of which two jobs would have one output.
    """
    first = due = next_time(cron)
    seen: dict[str, datetime.datetime] = {}
    for _ in range(_NAMES):
        name = spec_at(spec, due).output
        if (other := seen.setdefault(name, due)) is not due:
            times = f"of {other:%Y-%m-%d %H:%M} and of {due:%Y-%m-%d %H:%M}"
            fault = f"output: {name} would be that of the jobs {times}: give it more of the time"
            raise SettingsError([f"{fault}, like out-%Y-%m-%d-%H%M.jsonl"])
        due = next_time(cron, due)
    return first, spec_at(spec, first)


def spec_at(spec: BatchSpec, at: datetime.datetime) -> BatchSpec:
    """The job of one time; raises `SettingsError` if its output has no placeholder."""
    local = at.astimezone()
    named = msgspec.structs.replace(
        spec,
        input=local.strftime(spec.input),
        output=local.strftime(spec.output),
        errors=local.strftime(spec.errors),
    )
    if named.output == spec.output:
        raise SettingsError(
            ["output: a schedule needs a name with the time, like out-%Y-%m-%d.jsonl"]
        )
    return named


def read_time(text: str) -> datetime.datetime:
    """``2026-11-22T02:00``, ``02:00`` (the next one) or ``+90m``; raises `SettingsError`."""
    try:
        return _read_time(text)
    except (ValueError, OverflowError) as error:
        raise SettingsError(
            [f"at {text!r}: give a time like 2026-11-22T02:00, 02:00 or +90m"]
        ) from error


def _read_time(text: str) -> datetime.datetime:
    if text.startswith("+"):
        return now() + datetime.timedelta(milliseconds=span_ms(text[1:]))
    try:
        time = datetime.time.fromisoformat(text)
    except ValueError:
        return _local(datetime.datetime.fromisoformat(text))
    today = now().date()
    for day, fold in itertools.product(range(3), (0, 1)):  # the clock may show it twice
        date = today + datetime.timedelta(days=day)
        at = _local(datetime.datetime.combine(date, time.replace(fold=fold)))
        if at > now():
            break
    return at
