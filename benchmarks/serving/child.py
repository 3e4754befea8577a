"""The interpreter of an engine that is called directly, and its control.

The program's arguments: the kind of engine, the workload as JSON, and the descriptor of a pipe for
orders and outcomes, also as JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from benchmarks.serving.case import TIMEOUT_S, Load, Outcome, Workload
from benchmarks.yard import end_in_order, last_lines
from tokenyard.process.children import start_child, stop_child

Kind = Literal["program", "async"]
Way = Literal["generate", "stepped", "streamed"]
T = TypeVar("T")

_STOP_S: Final = 20.0
#: `LLM` runs its engine in its own process, like Tokenyard's workers; `AsyncLLM` cannot.
_ENVIRONMENT: Final[Mapping[Kind, Mapping[str, str]]] = {
    "program": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "async": {},
}


class Order(msgspec.Struct):
    """A load to put on the engine, and the way."""

    way: Way
    load: Load


class Child:
    """An engine in its own interpreter, which starts immediately and reports when it is ready."""

    def __init__(self, kind: Kind, process: subprocess.Popen[bytes], log: Path, pipe: Any) -> None:
        self._kind = kind
        self._process = process
        self._log = log
        self._pipe = pipe

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until its model is loaded."""
        self._hear(bool)

    def run(self, way: Way, load: Load) -> Outcome:
        """Put a load on the engine."""
        self._pipe.send_bytes(msgspec.json.encode(Order(way, load)))
        return self._hear(Outcome)

    def _hear(self, kind: type[T]) -> T:
        """Receive a reply; raises `ChildProcessError` if the child has ended, `TimeoutError`."""
        try:
            if not self._pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"the {self._kind} engine says nothing:\n{self._words()}")
            return msgspec.json.decode(self._pipe.recv_bytes(), type=kind)
        except (EOFError, ConnectionError) as fault:
            message = f"the {self._kind} engine has ended:\n{self._words()}"
            raise ChildProcessError(message) from fault

    def _words(self) -> str:
        return last_lines(self._log.read_text(errors="replace"))


@contextmanager
def engine_child(kind: Kind, workload: Workload) -> Iterator[Child]:
    """Start an interpreter with an engine."""
    ours, theirs = Pipe()
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder, ours:
        log = Path(folder) / "log"
        told = msgspec.json.encode(workload).decode()
        command = [sys.executable, "-m", "benchmarks.serving.child", kind, told]
        with theirs:
            process = start_child(
                [*command, str(theirs.fileno())],
                log,
                env={**os.environ, **_ENVIRONMENT[kind], "VLLM_NO_USAGE_STATS": "1"},
                pass_fds=[theirs.fileno()],
            )
        try:
            yield Child(kind, process, log, ours)
        finally:
            stop_child(process, _STOP_S)


def main() -> None:
    """Load the engine, report ready, and carry out orders until the pipe closes."""
    end_in_order()
    kind, told, descriptor = sys.argv[1:]
    workload = msgspec.json.decode(told, type=Workload)
    with Connection(int(descriptor)) as pipe, closing(_make(kind, workload)) as engine:
        pipe.send_bytes(msgspec.json.encode(True))
        while True:
            try:
                order = msgspec.json.decode(pipe.recv_bytes(), type=Order)
            except EOFError:
                return
            pipe.send_bytes(msgspec.json.encode(getattr(engine, order.way)(order.load)))


def _make(kind: str, workload: Workload) -> Any:
    from benchmarks.serving.engines import Async, Program

    return Program(workload) if kind == "program" else Async(workload)


if __name__ == "__main__":
    main()
