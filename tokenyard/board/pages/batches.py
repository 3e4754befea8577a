"""Batches: the jobs at RQ, one of them with its errors by line, cancel and resume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from redis.exceptions import NoPermissionError

from tokenyard.batch.answers import LineErrors, read_line_errors
from tokenyard.board.page import NotFound, Parameters, address, asked_page
from tokenyard.ops.batches import queue_of
from tokenyard.protocol.errors import Refused
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.texts import cut

if TYPE_CHECKING:
    from tokenyard.batch.rq.listing import ListedJob

#: Jobs of each place in the list of all, and in the list of one place.
_FEW: Final = 10
_MANY: Final = 50
_MOST_ERRORS: Final = 100
_NAME: Final = 120
_PATH: Final = 1_000
_TEXT: Final = 2_000
_ARGUMENTS: Final = 20_000
_WITHOUT_RIGHTS: Final = (
    "The board's user of Redis may not read the keys of RQ: give it the rights of gateway-batches,"
    " too (docs/board.md)."
)


def _sentence(error: Exception) -> str:
    text = str(error)
    return f"{text[:1].upper()}{text[1:]}."


def _find(yard: Yard, given: Parameters) -> ListedJob:
    """The job of the parameters; raises `NotFound`."""
    queue = queue_of(yard)
    from tokenyard.batch.rq.jobs import UnknownJob
    from tokenyard.batch.rq.listing import find_listed

    try:
        return find_listed(queue, cut(given.text("job"), _NAME))
    except UnknownJob as error:
        raise NotFound(_sentence(error)) from error


def view_batches(yard: Yard, given: Parameters) -> dict[str, Any]:
    """The jobs of all places, or those of one."""
    try:
        queue = queue_of(yard)
    except Refused as refused:
        return {"missing": _sentence(refused)}
    from tokenyard.batch.rq.listing import PLACES, count_jobs, list_jobs

    place = given.one_of("place", ("", *PLACES), "")
    number = asked_page(given)
    try:
        counts = count_jobs(queue)
    except NoPermissionError:
        return {"missing": _WITHOUT_RIGHTS}
    if place:
        chosen = [one for one in PLACES if one == place]
        found = list_jobs(queue, chosen, start=(number - 1) * _MANY, most=_MANY)
    else:
        found = list_jobs(queue, most=_FEW)
    is_more = bool(place) and counts[chosen[0]] > number * _MANY
    return {
        "missing": "",
        "place": place,
        "places": [(one, counts[one], address("/batches", {"place": one})) for one in PLACES],
        "total": sum(counts.values()),
        "few": _FEW,
        "jobs": [(job, _mood(job)) for job in found.jobs],
        "foreign": [(cut(name, _NAME), cut(why, _TEXT)) for name, why in found.foreign.items()],
        "number": number,
        "later": address("/batches", {"place": place, "page": number + 1}) if is_more else "",
        "first": address("/batches", {"place": place}) if number > 1 else "",
    }


def _mood(job: ListedJob) -> str:
    """The class of its badge."""
    return {
        "completed": "warn" if job.batch.request_counts.failed else "good",
        "failed": "bad",
        "expired": "bad",
        "cancelled": "warn",
        "cancelling": "warn",
    }.get(job.batch.status, "")


def view_batch(yard: Yard, given: Parameters) -> dict[str, Any]:
    """One job."""
    job = _find(yard, given)
    batch, spec = job.batch, job.order.spec
    is_opened = given.text("errors") == "open"
    here = f"/batches/{batch.id}"
    return {
        "job": job,
        "batch": batch,
        "mood": _mood(job),
        "message": cut(batch.message, _TEXT),
        "files": [
            ("Input", cut(batch.input_file_id, _PATH)),
            ("Results", cut(batch.output_file_id, _PATH)),
            ("Errors", cut(batch.error_file_id, _PATH)),
            ("State", cut(f"{spec.output}.state", _PATH)),
            ("Log", cut(f"{spec.output}.log", _PATH)),
        ],
        "times": [
            (name.replace("_", " ").capitalize(), 1000 * at)
            for name in ("created", "in_progress", "finalizing", *_ENDS)
            if (at := getattr(batch, f"{name}_at")) is not None
        ],
        "window": cut(batch.completion_window or "", _NAME),
        "cron": cut(batch.cron or "", _NAME),
        "worker": cut(job.worker, _NAME),
        "errors": _errors(batch.error_file_id) if is_opened else None,
        "most_errors": _MOST_ERRORS,
        "open_errors": address(here, {"errors": "open"}),
        "here": address(here, {"errors": "open"}) if is_opened else here,
        "arguments": _arguments(job, shows_all=given.actor.may("admin")),
    }


_ENDS: Final = ("completed", "failed", "expired", "cancelled")


def _errors(path: str) -> LineErrors:
    """The first errors by line."""
    if "://" in path:
        return LineErrors((), is_whole=False, problem="it lies in the gateway's storage")
    return read_line_errors(Path(path), _MOST_ERRORS)


def _arguments(job: ListedJob, *, shows_all: bool) -> str:
    """The arguments as JSON; call-backs may have secrets, so only admins see them."""
    order = msgspec.to_builtins(job.order)
    if not shows_all:
        for name in ("on_success", "on_failure"):
            order[name] = f"hidden ({len(order[name])} characters)" if order[name] else ""
    return cut(msgspec.json.format(msgspec.json.encode(order), indent=2).decode(), _ARGUMENTS)
