"""Scheduled batch jobs: when the next one is due, and the names of its files.

RQ's cron scheduler stores its jobs with pickle, so each job enqueues its successor instead, with
`Queue.enqueue_at`. File names may have placeholders of `strftime`, like ``out-%Y-%m-%d.jsonl``.
"""

from __future__ import annotations

import datetime
import re
from typing import Final

import msgspec
from croniter import CroniterBadCronError, croniter

from tokenyard.batch.state import BatchSpec
from tokenyard.protocol.errors import SettingsError

_IN: Final = re.compile(r"\+(?P<count>\d+)(?P<unit>[smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def now() -> datetime.datetime:
    """The local time."""
    return datetime.datetime.now().astimezone()


def next_time(cron: str, after: datetime.datetime | None = None) -> datetime.datetime:
    """When a schedule is due next, in this machine's time zone; raises `SettingsError`."""
    try:
        due: datetime.datetime = croniter(cron, after or now()).get_next(datetime.datetime)
    except (CroniterBadCronError, ValueError, KeyError) as error:
        raise SettingsError([f"cron {cron!r}: {error}; write it like '0 2 * * *'"]) from error
    return due


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
    found = _IN.fullmatch(text)
    if found is not None:
        return now() + datetime.timedelta(seconds=int(found["count"]) * _UNITS[found["unit"]])
    try:
        at = datetime.datetime.combine(now().date(), datetime.time.fromisoformat(text)).astimezone()
        return at if at > now() else at + datetime.timedelta(days=1)
    except ValueError:
        pass
    return datetime.datetime.fromisoformat(text).astimezone()
