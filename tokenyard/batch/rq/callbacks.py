"""Calls a URL or runs a command when a job of RQ is over.

A call-back that fails is logged and does not affect the job.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import urllib.error
import urllib.request
from typing import Any, Final

import msgspec
import redis

from tokenyard import clock
from tokenyard.batch.rq.jobs import KnownJob, describe
from tokenyard.batch.rq.work import WorkerContext

#: All tries together must fit into `CALLBACK_TIMEOUT_S`.
_TRIES: Final = 3
_PAUSE_S: Final = 2.0
_REQUEST_TIMEOUT_S: Final = 20.0
_COMMAND_TIMEOUT_S: Final = 90.0

_log = logging.getLogger("tokenyard.batch")


def succeeded(job: KnownJob, _connection: redis.Redis, _result: Any) -> None:
    """Report a completed job; RQ calls this."""
    _notify(job.order.on_success, describe(job) | {"rq_status": "finished"})


def failed(job: KnownJob, _connection: redis.Redis, *_error: Any) -> None:
    """Report a failed job, after its last try; RQ calls this after each."""
    if not job.retries_left:
        batch = describe(job) | {"rq_status": "failed"}
        if batch["status"] not in {"cancelled", "expired"}:
            batch["status"] = "failed"
        _notify(job.order.on_failure, batch)


def _notify(target: str, batch: dict[str, Any]) -> None:
    try:
        if target.startswith(("http://", "https://")):
            _post(target, msgspec.json.encode(batch))
        elif target and not WorkerContext.runs_commands:
            _log.warning("job %s: this worker runs no commands: %s", batch["id"], target)
        elif target:
            _run(target, batch)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.warning("job %s: its call-back %s failed: %s", batch["id"], target, error)


def _post(url: str, body: bytes) -> None:
    """Post to a URL, with retries."""
    request = urllib.request.Request(  # noqa: S310 - `_notify` checked the scheme
        url, data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    for left in reversed(range(_TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S):  # noqa: S310 - as above
                return
        except OSError:
            if not left:
                raise
            clock.sleep(_PAUSE_S)


def _run(command: str, batch: dict[str, Any]) -> None:
    """Run a command without a shell, with the batch on standard input and in the environment."""
    ours = WorkerContext.variables_of_imports
    users = {name: value for name, value in os.environ.items() if name not in ours}
    named = {
        "TOKENYARD_BATCH_ID": str(batch["id"]),
        "TOKENYARD_BATCH_STATUS": str(batch["status"]),
        "TOKENYARD_BATCH_OUTPUT": str(batch["output_file_id"]),
        "TOKENYARD_BATCH_ERRORS": str(batch["error_file_id"]),
    }
    subprocess.run(
        shlex.split(command),
        input=msgspec.json.encode(batch),
        env=users | named,
        timeout=_COMMAND_TIMEOUT_S,
        check=True,
    )
