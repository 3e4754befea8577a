"""Gateways forked from a process that has imported vLLM, which takes seconds of a core."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.support.processes import START_S, Program, as_words

_context = multiprocessing.get_context("forkserver")


class ForkedGateway(Program):
    """A gateway's process, with the API of a program."""

    def __init__(self, module: str, options: Mapping[str, object], log: Path) -> None:
        assert module == "gateway"
        _context.set_forkserver_preload(["tests.gateway.preloaded"])
        self.log_path = log
        self._forked: ForkServerProcess = _context.Process(
            target=_run, args=(as_words(options), log)
        )
        self._forked.start()
        assert self._forked.pid is not None
        self.pid = self._forked.pid

    @property
    def is_running(self) -> bool:
        return self._forked.is_alive()

    def signal(self, number: signal.Signals) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = START_S) -> int:
        self._forked.join(timeout_s)
        assert self._forked.exitcode is not None, "it still runs"
        return self._forked.exitcode


def _run(options: list[str], log: Path) -> None:
    """``python -m gateway``, in the new process."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    from gateway.__main__ import main

    main(options)
