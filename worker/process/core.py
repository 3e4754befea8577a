"""The core process of a device: warm, then with one model after the other."""

from __future__ import annotations

import logging
from multiprocessing.connection import Connection

from tokenyard.protocol.settings import WorkerSettings
from worker import executor
from worker.engines.loading import make_core_backend
from worker.process.start import start_process

log = logging.getLogger("tokenyard.worker.core")


def main(
    settings: WorkerSettings, device: int, log_level: int, address: str, output: Connection
) -> None:
    """Entry point of the process; it listens at ``address`` for its front."""
    start_process(f"tokenyard core {settings.yard} device {device}", log_level, output)
    try:
        backend = make_core_backend(settings, device, executor)
        from worker.engines.vllm.core_process import CoreProcess  # after the look at the CPU

        process = CoreProcess(backend, address)
    except Exception:
        # Its front fails alike, and the controller reports why in a sentence.
        log.debug("a core does not start", exc_info=True)
        raise SystemExit(1) from None
    process.run()
