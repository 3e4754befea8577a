"""Programs forked from a process that has imported vLLM, which takes seconds of a core."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.cli.running import environment
from tests.gateway.stalls import Stalls
from tests.support.processes import START_S, Program, as_words
from tokenyard.protocol.gateway_settings import GatewaySettings

_context = multiprocessing.get_context("forkserver")


class Forked(Program):
    """A process that runs a function with words of a command line, with the API of a program."""

    def __init__(
        self,
        run: Callable[[list[str]], object],
        words: Sequence[str],
        log: Path,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        _context.set_forkserver_preload(["tests.gateway.preloaded"])
        self.log_path = log
        self._forked: ForkServerProcess = _context.Process(
            target=_run, args=(run, list(words), log, variables or environment())
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


class ForkedGateway(Forked):
    """``python -m gateway``, whose event loop is watched."""

    def __init__(self, module: str, options: Mapping[str, object], log: Path) -> None:
        assert module == "gateway"
        path = log.with_suffix(".stalls")
        self.stalls = Stalls(path)
        super().__init__(functools.partial(_gateway, path), as_words(options), log)


class ForkedBatchWorker(Forked):
    """``tokenyard batch worker``; its words begin behind ``tokenyard``."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        super().__init__(_batch_worker, words, log)


class ForkedCommand(Forked):
    """``tokenyard WORDS`` with these variables."""

    def __init__(self, words: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        super().__init__(_command, words, log, variables)


def _gateway(stalls: Path, words: list[str]) -> None:
    from gateway import server
    from gateway.__main__ import main

    async def watched(settings: GatewaySettings, listener: socket.socket) -> None:
        Stalls(stalls).watch()
        await serve(settings, listener)

    serve = server._serve
    pytest.MonkeyPatch().setattr(server, "_serve", watched)
    main(words)


def _batch_worker(words: list[str]) -> None:
    from gateway.batches import spool

    # A short job has parts in its bucket, too.
    pytest.MonkeyPatch().setattr(spool, "_EVERY_S", 0.5)
    _command(words)


def _command(words: list[str]) -> None:
    from tokenyard.cli import main

    main(words, prog_name="tokenyard")


def _run(
    run: Callable[[list[str]], object], words: list[str], log: Path, variables: Mapping[str, str]
) -> None:
    """In the new process."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    # The fork server has those of the time when it started.
    os.environ.update(variables)
    tempfile.tempdir = None
    run(words)
