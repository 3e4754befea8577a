"""A `tokenyard batch worker` whose jobs need a preparation of a test.

``python -m tests.batch.prepared FUNCTION words...``: a function of this module, called before the
worker forks for a job, and the words of `tokenyard`.
"""

from __future__ import annotations

import os
import signal
import sys

from tokenyard.batch.rq import jobs, worker
from tokenyard.cli import main


def tell() -> None:
    """Say which process is prepared."""
    sys.stderr.write(f"prepared {os.getpid()}\n")


def be_stopped() -> None:
    """SIGTERM comes while the worker imports."""
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    """Something is not installed."""
    raise ImportError("nothing of this is here")


if __name__ == "__main__":
    name = f"tests.batch.prepared.{sys.argv[1]}"
    worker._PREPARATIONS = {jobs._PERFORM: name}  # type: ignore[misc]
    main(sys.argv[2:], prog_name="tokenyard")
