"""Search for processes that a test run has left behind."""

from __future__ import annotations

import os
import uuid

import psutil

_MARK = "TOKENYARD_TEST_RUN"


def mark_descendants() -> None:
    """Make all later processes recognisable, also after the death of their parent."""
    os.environ[_MARK] = uuid.uuid4().hex
    # Otherwise setproctitle overwrites the environment that marks the process.
    os.environ["SPT_NOENV"] = "1"


def _is_ours(process: psutil.Process) -> bool:
    try:
        return bool(process.environ().get(_MARK) == os.environ[_MARK])
    except (psutil.Error, OSError):
        return False


def _is_alive(process: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        command = " ".join(process.cmdline())
        # These belong to this interpreter and end with it.
        is_server = "multiprocessing.forkserver" in command and process.ppid() == os.getpid()
        return not is_server and "multiprocessing.resource_tracker" not in command
    except psutil.NoSuchProcess:
        return False


def end_leftovers(grace_s: float) -> list[str]:
    """Kill processes that remain after ``grace_s``; one line for each killed process."""
    me = psutil.Process()
    found = {process.pid: process for process in me.children(recursive=True)}
    found |= {process.pid: process for process in psutil.process_iter() if _is_ours(process)}
    found.pop(me.pid, None)
    _, remaining = psutil.wait_procs(
        [process for process in found.values() if _is_alive(process)], timeout=grace_s
    )
    lines = []
    for process in filter(_is_alive, remaining):
        lines.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
        process.kill()
    return lines
