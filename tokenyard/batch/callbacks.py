"""What happens when a job of RQ is over: a URL is told, or a command is run.

A call-back that fails is logged; the job stays what it is.
"""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any, Final

import msgspec
import redis
from rq.job import Job

from tokenyard.batch.jobs import describe, order_of

#: RQ allows `CALLBACK_TIMEOUT_S` for all tries together.
_TRIES: Final = 3
_PAUSE_S: Final = 2.0
_REQUEST_TIMEOUT_S: Final = 20.0
_COMMAND_TIMEOUT_S: Final = 90.0

_log = logging.getLogger("tokenyard.batch")


def succeeded(job: Job, _connection: redis.Redis, _result: Any) -> None:
    """RQ calls this when a job has completed."""
    _tell(order_of(job).on_success, describe(job) | {"rq_status": "finished"})


def failed(job: Job, _connection: redis.Redis, *_fault: Any) -> None:
    """RQ calls this when a try has failed: only after the last one there is something to tell."""
    if not job.retries_left:
        batch = describe(job) | {"rq_status": "failed"}
        if batch["status"] not in {"cancelled", "expired"}:
            batch["status"] = "failed"
        _tell(order_of(job).on_failure, batch)


def _tell(target: str, batch: dict[str, Any]) -> None:
    try:
        if target.startswith(("http://", "https://")):
            _post(target, msgspec.json.encode(batch))
        elif target:
            _run(target, batch)
    except (OSError, ValueError, subprocess.SubprocessError) as fault:
        _log.warning("job %s: its call-back %s failed: %s", batch["id"], target, fault)


def _post(url: str, body: bytes) -> None:
    """Tell a URL, some times if need be."""
    request = urllib.request.Request(  # noqa: S310 - `_tell` has looked at the scheme
        url, data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    for left in reversed(range(_TRIES)):
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S):  # noqa: S310 - as above
                return
        except OSError:
            if not left:
                raise
            time.sleep(_PAUSE_S)


def _run(command: str, batch: dict[str, Any]) -> None:
    """Run a command, without a shell; the batch is on its standard input and in its environment."""
    named = {
        "TOKENYARD_BATCH_ID": str(batch["id"]),
        "TOKENYARD_BATCH_STATUS": str(batch["status"]),
        "TOKENYARD_BATCH_OUTPUT": str(batch["output_file_id"]),
        "TOKENYARD_BATCH_ERRORS": str(batch["error_file_id"]),
    }
    subprocess.run(
        shlex.split(command),
        input=msgspec.json.encode(batch),
        env=os.environ | named,
        timeout=_COMMAND_TIMEOUT_S,
        check=True,
    )
