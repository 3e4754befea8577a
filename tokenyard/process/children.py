"""Child processes that end when their parent does, however it ends.

On Linux the kernel sends the child SIGTERM when the thread that started it dies, also by SIGKILL
(``PR_SET_PDEATHSIG``): start children from a thread that lives as long as they should. Elsewhere
a child outlives a parent that is killed; one that ends in order stops its children itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

#: Runs in the child before the program itself. Not a ``preexec_fn``, which may deadlock where the
#: parent has threads. The parent may have died before the kernel knew whom to watch.
_LAUNCHER: Final = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
#: Time for a child that was told twice.
HURRY_S: Final = 3.0
#: How often a stopping child is looked at.
_POLL_S: Final = 0.02
#: A killed process is gone at once, unless the machine is very busy.
_KILL_WAIT_S: Final = 5.0


def start_child(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command``, whose first part is an absolute path; its output is appended to ``log``.

    It leads a process group of its own, so that Ctrl-C in a terminal reaches the parent alone,
    which then stops its children in the right order.
    """
    prefix: list[str] = []
    if sys.platform == "linux":
        prefix = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=pass_fds,
            process_group=0,
        )


def stop_child(
    process: subprocess.Popen[bytes],
    grace_s: float,
    hurry: Callable[[], bool] = lambda: False,
) -> int:
    """End a child and its process group; its exit status.

    SIGTERM first, and once more as soon as ``hurry`` says so, which leaves it `HURRY_S`. What is
    left in the end is killed.
    """
    _terminate(process)
    if not _has_ended(process, grace_s, hurry) and hurry():
        _terminate(process)
        _has_ended(process, HURRY_S)
    # Also where the leader has ended: what it has left behind is in the same group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(_KILL_WAIT_S)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _has_ended(
    process: subprocess.Popen[bytes], within_s: float, unless: Callable[[], bool] = lambda: False
) -> bool:
    until = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < until and not unless():
        time.sleep(_POLL_S)
    return process.poll() is not None
