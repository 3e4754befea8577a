"""Batch jobs from a script: `run_batch` here and now, `stream_batch` without files.

`tokenyard.batch.jobs` hands jobs to RQ.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import msgspec

from tokenyard.batch.asking import Asked, ask_for, output_for
from tokenyard.batch.files import NumberedLine, read_lines
from tokenyard.batch.runner import Progress, Runner
from tokenyard.batch.state import DEFAULT_RESULT_TTL_S, BatchSpec, BatchState, new_id
from tokenyard.client.aio import AsyncClient
from tokenyard.client.options import Item, SharedOptions
from tokenyard.protocol.keys import PriorityClass

#: Lines of a batch that is no file: each as JSON text, or as what that says.
Lines = Iterable[Mapping[str, Any] | bytes | str]


class BatchOptions(TypedDict, total=False):
    """What may be said of a job; see `BatchSpec`."""

    errors: str | os.PathLike[str]
    model: str
    params: Mapping[str, Any]
    priority_class: PriorityClass
    window: int
    ordered: bool
    hedge: bool
    completion_window_s: float
    result_ttl_s: int
    tenant: str


def spec_of(
    input: str | os.PathLike[str],  # noqa: A002 - the file's role, as on the command line
    output: str | os.PathLike[str],
    options: BatchOptions,
) -> BatchSpec:
    """A spec from what a script says; raises `SettingsError`."""
    given = dict(cast(Mapping[str, Any], options))
    given["errors"] = os.fspath(given.get("errors") or "")
    given["params"] = dict(given.get("params") or {})
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
    on_progress: Callable[[Progress], None] = lambda _: None,
    **options: Unpack[BatchOptions],
) -> BatchState:
    """Run a file of requests and wait for the end; call it again to go on where it stopped.

    ``overwrite`` begins anew; ``retry_errors`` runs lines again that have an error. The state
    that it returns has ``status`` and ``counts``. Raises `SettingsError`, `UnreadableFile`,
    `InvalidRequest` for bad ``params``, `NoCoordinator`...
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
    """Run batch lines and give back output lines as they come, without files and without resume.

    ``lines`` is a path, or an iterable of batch lines. Bad lines come back with an error, in
    their turn. At most ``window`` lines are in memory.
    """
    spec = BatchSpec(
        input="", output="", model=model, params=dict(params or {}), priority_class=priority_class
    )
    under_way: dict[int, Asked] = {}

    def items() -> Iterable[Item]:
        for index, (number, raw) in enumerate(_numbered(lines)):
            under_way[index] = ask_for(spec, number, raw, "")
            yield under_way[index].item

    shared: SharedOptions = {"priority_class": priority_class, "result_ttl_s": DEFAULT_RESULT_TTL_S}
    async with AsyncClient(redis_url, yard) as client:
        answers = client.map(items(), window=window, ordered=ordered, **shared)
        async for index, result in answers:
            line = output_for(client.client_id, under_way.pop(index), result)
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
