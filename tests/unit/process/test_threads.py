"""A program whose thread fails ends with the reason."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import threading
from tokenyard.process.threads import end_with_threads
end_with_threads()
threading.Thread(target=lambda: {}["leases"], name="leases").start()
threading.Event().wait()
"""


def test_an_error_that_ends_a_thread_ends_the_process_with_the_reason() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "leases" in ended.stderr
    assert "KeyError" in ended.stderr
