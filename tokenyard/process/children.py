"""Child processes that end with their parent, however it ends.

On Linux the kernel signals the child when the thread that started it dies, also by SIGKILL
(``PR_SET_PDEATHSIG``): start children from a thread that lives as long as they should. Elsewhere
a child outlives a parent that is killed; a parent that ends in order stops its children itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tokenyard import clock
from tokenyard.protocol.errors import SettingsError

_PR_SET_PDEATHSIG: Final = 1
#: Runs in the child before the program itself. Not a ``preexec_fn``, which may deadlock where the
#: parent has threads. The parent may have died before the call.
_LAUNCHER: Final = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)}, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
#: Time for a child after its second SIGTERM.
HURRY_S: Final = 3.0
_POLL_S: Final = 0.02
#: A killed process ends immediately, unless the machine is very busy.
_KILL_WAIT_S: Final = 5.0


def bind_forked_children() -> None:
    """Let the kernel kill each child that this process forks from now on when this process ends.

    Linux only.
    """
    if sys.platform != "linux":
        return
    parent = [0]
    prctl = ctypes.CDLL(None).prctl

    def remember() -> None:
        parent[0] = os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent[0]:
            os._exit(1)

    os.register_at_fork(before=remember, after_in_child=bind)


def start_child(
    command: Sequence[str],
    log: Path | None,
    *,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``command``, whose first part is an absolute path.

    Its output is appended to ``log``, or goes where ours goes. It leads its own process group, so
    that Ctrl-C in a terminal reaches only the parent, which then stops its children in the right
    order.
    """
    prefix: list[str] = []
    if sys.platform == "linux":
        prefix = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid())]
    with log.open("ab") if log else contextlib.nullcontext() as output:
        return subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            env=env,
            pass_fds=pass_fds,
            process_group=0,
        )


def stop_child(
    process: subprocess.Popen[bytes], grace_s: float, hurry: Callable[[], bool] = lambda: False
) -> int:
    """End a child and its process group; returns its exit status.

    Sends SIGTERM, and again once ``hurry`` returns True, which leaves it `HURRY_S`. Then kills the
    processes that are left.
    """
    process.terminate()
    if not _has_ended(process, grace_s, hurry) and hurry():
        process.terminate()
        _has_ended(process, HURRY_S)
    # Also where the leader has ended: its own children are in the same group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(_KILL_WAIT_S)


def _has_ended(
    process: subprocess.Popen[bytes], within_s: float, unless: Callable[[], bool] = lambda: False
) -> bool:
    until = clock.monotonic() + within_s
    while process.poll() is None and clock.monotonic() < until and not unless():
        clock.sleep(_POLL_S)
    return process.poll() is not None


def printed_version(
    program: str | Path, name: str, within_s: float, env: Mapping[str, str] | None = None
) -> str:
    """What a program prints of its version; ``name`` is its name in an error.

    Raises `SettingsError` where it cannot be run.
    """
    try:
        return subprocess.run(
            [program, "--version"],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SettingsError([f"{name} cannot be run: {error}"]) from error
