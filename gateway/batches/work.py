"""Runs a batch of a gateway in RQ's worker, by the gateway's own front end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.batches.files import FileStore, storage_of
from gateway.batches.spool import spooled
from gateway.batches.storage import S3_SCHEME
from tokenyard.batch.asking import Asking, Ending
from tokenyard.batch.opening import OpenJob
from tokenyard.batch.rq.jobs import JobOrder
from tokenyard.batch.rq.work import WorkerContext, carry_out
from tokenyard.process.extras import why_no_gateway
from tokenyard.process.interpreter import collect_seldom
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.texts import pip_install

if TYPE_CHECKING:
    from gateway.frontend.fetching import FileReader


def perform(order: dict[str, Any]) -> Any:
    """Run the lines of a batch that are not done; RQ calls this."""
    read = msgspec.convert(order, JobOrder)
    front_end = partial(_front_end, FileStore(storage_of(read.spec.input)).content)
    if not read.spec.input.startswith(S3_SCHEME):
        return carry_out(read, front_end)
    with spooled(read.spec) as spool:
        local = msgspec.structs.replace(read, spec=spool.spec)
        return carry_out(local, front_end, keep=spool.keep, publish=spool.publish)


def prepare() -> None:
    """Import vLLM's front end, which takes seconds; raises `SettingsError` where it cannot be.

    RQ's worker calls this before it forks, so that the processes of later batches have it. It opens
    no device; the only threads are OpenBLAS's, which end before a fork.
    """
    if why := why_no_gateway():
        raise SettingsError([f"batches of a gateway: {why}"])
    # Late: a worker that runs other jobs needs nothing of this.
    try:
        from gateway.frontend import derived

        derived.install()
        import gateway.batches.asking  # noqa: F401
    except ImportError as error:
        message = f"batches of a gateway need more here ({error}): {pip_install('gateway')}"
        raise SettingsError([message]) from error
    collect_seldom()  # no collection touches, and so copies, what the forked processes share


def _front_end(
    read_file: FileReader, job: OpenJob, ending: Ending
) -> AbstractContextManager[Asking]:
    prepare()
    from gateway.announcements import OwnRules
    from gateway.batches.asking import by_front_end

    rules = OwnRules(
        WorkerContext.model_paths,
        WorkerContext.trust_remote_code,
        WorkerContext.allowed_media_domains,
    )
    return by_front_end(WorkerContext.url, WorkerContext.yard, rules, read_file)(job, ending)
