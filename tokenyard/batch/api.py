"""Batch jobs from a script: `run_batch` here and now, `stream_batch` without files.

`tokenyard.batch.rq.jobs` hands jobs to RQ.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec

from tokenyard.batch.files import NumberedLine, read_lines
from tokenyard.batch.requests import LineRequest, line_request, output_for
from tokenyard.batch.runner import Runner
from tokenyard.batch.state import DEFAULT_RESULT_TTL_S, Batch, BatchSpec, BatchState, new_id
from tokenyard.client.aio import AsyncClient
from tokenyard.client.options import Item, SharedOptions
from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.wire import Task

#: Lines that are not in a file: each as JSON text or as the decoded object.
Lines = Iterable[Mapping[str, Any] | bytes | str]


class BatchOptions(TypedDict, total=False):
    """Options of a job; see `BatchSpec`."""

    errors: str | os.PathLike[str]
    model: str
    params: Mapping[str, Any]
    priority_class: PriorityClass
    window: int
    ordered: bool
    completion_window_s: float
    result_ttl_s: int
    tenant: str
    task: Task
    column: str
    prompt: str
    message: str
    image: str
    into: str


def spec_of(
    input: str | os.PathLike[str],  # noqa: A002 - the file's role, as on the command line
    output: str | os.PathLike[str],
    options: Mapping[str, object],
) -> BatchSpec:
    """A spec from `BatchOptions`, some of which may be None; raises `SettingsError`."""
    given: dict[str, Any] = dict(options)
    given["errors"] = os.fspath(given.get("errors") or "")
    given["params"] = dict(given.get("params") or {})
    given["window"] = given.get("window") or 0
    spec = BatchSpec(input=os.fspath(input), output=os.fspath(output), **given)
    spec.check()
    return spec


def run_batch(
    input: str | os.PathLike[str],  # noqa: A002 - the file's role, as on the command line
    output: str | os.PathLike[str],
    *,
    redis_url: str,
    yard: str = "main",
    overwrite: bool = False,
    retry_errors: bool = False,
    on_progress: Callable[[Batch], None] = lambda _: None,
    **options: Unpack[BatchOptions],
) -> BatchState:
    """Run a file of requests, or a table, to the end; call it again to continue where it stopped.

    ``overwrite`` starts over; ``retry_errors`` runs lines with an error again. ``on_progress`` gets
    the batch object about once a second. The returned state has ``status`` and ``counts``. Raises
    `SettingsError`, `UnreadableFile`, `InvalidRequest` for bad ``params``, `NoCoordinator`...
    """
    runner = Runner(redis_url, yard, spec_of(input, output, options), on_progress=on_progress)
    return runner.run(overwrite=overwrite, retry=new_id() if retry_errors else "")


async def stream_batch(
    lines: Lines | Path,
    *,
    redis_url: str,
    yard: str = "main",
    model: str = "",
    params: Mapping[str, Any] | None = None,
    window: int = 1_000,
    ordered: bool = False,
    priority_class: PriorityClass = "low",
) -> AsyncIterator[dict[str, Any]]:
    """Run batch lines and yield output lines as they complete, without files and without resume.

    ``lines`` is a path or an iterable of batch lines. An invalid line yields an error. At most
    ``window`` lines are in memory.
    """
    spec = BatchSpec(
        input="", output="", model=model, params=dict(params or {}), priority_class=priority_class
    )
    pending: dict[int, LineRequest] = {}

    def items() -> Iterable[Item]:
        for index, (number, raw) in enumerate(_numbered(lines)):
            pending[index] = line_request(spec, number, raw, "")
            yield pending[index].item

    shared: SharedOptions = {"priority_class": priority_class, "result_ttl_s": DEFAULT_RESULT_TTL_S}
    async with AsyncClient(redis_url, yard) as client:
        answers = client.map(items(), window=window, ordered=ordered, **shared)
        async for index, result in answers:
            line = output_for(client.client_id, pending.pop(index), result)
            yield msgspec.to_builtins(line)


def _numbered(lines: Lines | Path) -> Iterable[NumberedLine]:
    if isinstance(lines, Path):
        yield from read_lines(lines)
        return
    for number, line in enumerate(lines, 1):
        if isinstance(line, str):
            yield number, line.encode()
        else:
            yield number, line if isinstance(line, bytes) else msgspec.json.encode(line)
