"""A whole yard as a user starts it: `tokenyard up` with the adder on real vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

#: Time for two engines to start together on two busy cores; each imports vLLM.
UP_WITHIN_S = 300.0
STOP_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Up:
    """A running yard."""

    url: str
    yard: str
    controller: int  # pid
    http_url: str | None  # of its gateway
    pids: Mapping[str, int]  # by part

    def worker_pids(self) -> list[int]:
        """The pids of the engines' processes."""
        found = []
        for one in psutil.Process(self.controller).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if one.cmdline()[0].startswith("tokenyard worker"):
                    found.append(one.pid)
        return found


def tokenyard(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `tokenyard` to its end."""
    command = [sys.executable, "-m", "tokenyard", *arguments]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


@contextmanager
def running_up(folder: Path, *options: str, before: Sequence[str] = ()) -> Iterator[Up]:
    """Run `tokenyard up`, without gateway and board unless ``options`` ask for them.

    Ctrl-C at the end must stop it with status 0.
    """
    command = [sys.executable, "-m", "tokenyard", *before, "up", "--json"]
    command += ["--data-dir", str(folder / "yard"), "--port", "0", "--grace-s", "5"]
    command += ["--no-gateway", "--no-board", *options]
    # Commands and clients without a URL must not find this yard.
    apart = {**os.environ, "XDG_DATA_HOME": str(folder / "xdg")}
    with (
        (folder / "up.log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=apart) as process,
    ):
        try:
            ready = json.loads(_first_line(process, folder / "up.log"))
            pids = ready["pids"]
            yield Up(ready["url"], ready["yard"], pids["worker"], ready["http_url"], pids)
            process.send_signal(signal.SIGINT)
            assert process.wait(STOP_WITHIN_S) == 0, (folder / "up.log").read_text()
        finally:
            process.kill()


def _first_line(process: subprocess.Popen[bytes], log: Path) -> bytes:
    output: IO[bytes] | None = process.stdout
    assert output is not None
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        if selector.select(UP_WITHIN_S) and (line := output.readline()):
            return line
    raise AssertionError(f"tokenyard up did not come up:\n{log.read_text()}")
