"""Times a request through all of Tokenyard, for a model that no worker holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.cold_start.case import TIMEOUT_S, Task, Timed, phases
from benchmarks.sums import ANSWER_TOKENS
from benchmarks.yard import ServingYard, embedded_broker, models_yard, read_commands, wait_until
from tokenyard import Client
from tokenyard.client.sync import Handle
from tokenyard.yard.snapshot import YardView

_YARD = "cold"
#: Idle seconds of the yard before the request.
_IDLE_S = 1.0


def measure_request(models: Path, task: Task, before: Task) -> Timed:
    """Time from `submit` to the first delta; the only device holds ``before``'s model, idle."""
    with (
        embedded_broker() as broker,
        models_yard(broker, _YARD, models, max_model_wait_s=TIMEOUT_S) as yard,
        Client(yard.url, yard=yard.name, result_timeout_s=TIMEOUT_S) as client,
    ):
        before.check("request before", _text(_ask(client, before)))
        wait_until(yard.url, yard.name, _is_idle, TIMEOUT_S)
        time.sleep(_IDLE_S)
        began, clock = time.time(), time.perf_counter()
        handle = _ask(client, task)
        next(iter(handle))
        seconds = time.perf_counter() - clock
        task.check("request", _text(handle))
        return Timed(seconds, _phases_s(yard, task, began, began + seconds))


def _ask(client: Client, task: Task) -> Handle:
    return client.submit(
        task.prompt,
        model=task.model.name,
        stream=True,
        max_tokens=ANSWER_TOKENS,
        temperature=0.0,
    )


def _text(handle: Handle) -> str:
    return handle.result(TIMEOUT_S).text or ""


def _is_idle(view: YardView) -> bool:
    return any(worker.is_ready and not worker.lane for worker in view.workers)


def _phases_s(yard: ServingYard, task: Task, began: float, end: float) -> Mapping[str, float]:
    """Seconds by phase, from the control stream and the roster; times are unix seconds."""
    name = task.model.name
    commanded = max(ms for ms, command in read_commands(yard) if command.model == name) / 1000
    view = wait_until(yard.url, yard.name, _is_idle, TIMEOUT_S)
    [info] = [worker.info for worker in view.workers if worker.info and worker.is_ready]
    ready = info.since_ms / 1000
    loading_s = sum(info.phases_s.values())
    ends = {"placement": commanded, "unload": ready - loading_s}
    return {**phases(began, ends), **info.phases_s, "first token": end - ready}
