"""Times a cold `vllm serve` and a cold `vllm.LLM`, each to its first token."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from benchmarks.child import run_child
from benchmarks.cold_start.case import TIMEOUT_S, Task, Timed, phases
from benchmarks.progress import tell
from benchmarks.serving.case import engine_arguments
from benchmarks.sums import ANSWER_TOKENS
from benchmarks.yard import last_lines
from gateway.bridge.unit import front_program, named_vllm
from tokenyard.process.children import start_child, stop_child
from tokenyard.process.embedded_broker import free_port
from tokenyard.protocol.errors import SettingsError
from worker.models import ModelSpec

HOST: Final = "127.0.0.1"
#: The front ends of vLLM's server: the one in Python, and the one in Rust.
Front = Literal["vllm", "vllm-rs"]
_OPTIONS: Final[dict[Front, list[str]]] = {
    "vllm": ["--disable-log-stats", "--disable-uvicorn-access-log"],
    "vllm-rs": ["--disable-log-stats"],
}
_ROOT: Final = Path(__file__).parents[2]
_POLL_S: Final = 0.02
_STOP_S: Final = 20.0
#: One process, like Tokenyard's engines; by default vLLM starts one or two more and takes longer.
_ENVIRONMENT: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}

#: vLLM's log text at the end of each phase. If a version's text differs, phases merge.
_MILESTONES: Final = {
    "import": "non-default args",  # the first process, with its interpreter
    "executor": "Starting to load model",  # two more processes, which import vLLM too
    "weights": "Loading weights took",
    "warm-up": "init engine (",
}


def measure_serve(task: Task) -> Timed:
    """Time from the start of the process to the first token of a streamed completion."""
    began = time.monotonic()
    with served(task.model) as server:
        server.wait_until_healthy()
        up = time.monotonic()
        tokens = _stream(server.port, task)
        first = next(tokens)
        end = time.monotonic()
        task.check("vllm serve", "".join([first, *tokens]))
    phases_s = phases(began, {**server.seen, "http server": up, "first token": end})
    return Timed(end - began, phases_s)


def measure_llm(task: Task) -> Timed:
    """Time from the start of the interpreter to the first token."""
    settings = json.dumps(engine_arguments(task.model))
    arguments = [settings, task.prompt, str(ANSWER_TOKENS)]
    began = time.monotonic()
    said = run_child("benchmarks.cold_start.llm_child", arguments, environment=_ENVIRONMENT)
    task.check("vllm.LLM", said["answer"])
    phases_s = phases(began, said["ends"])
    phases_s["executor"] -= sum(said["inner_s"].values())
    return Timed(said["ends"]["first token"] - began, {**phases_s, **said["inner_s"]})


class Server:
    """A starting server and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int) -> None:
        self.port = port
        self.pid = process.pid
        self.seen: dict[str, float] = {}  # monotonic times of the milestones
        self._process = process
        self._log = log
        self._text = ""

    def wait_until_healthy(self) -> None:
        """Wait for health; raises `TimeoutError`, or `ChildProcessError` if the server ends."""
        until = time.monotonic() + TIMEOUT_S
        while not self._is_healthy():
            self._read_log()
            if self._process.poll() is not None:
                raise ChildProcessError(f"vllm serve has ended:\n{last_lines(self._text)}")
            if time.monotonic() > until:
                raise TimeoutError(f"vllm serve is not up:\n{last_lines(self._text)}")
            time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        with suppress(ConnectionError):
            return ask(self.port, "GET", "/health").status == http.client.OK
        return False

    def _read_log(self) -> None:
        self._text = self._log.read_text(errors="replace")
        for phase, words in _MILESTONES.items():
            if phase not in self.seen and words in self._text:
                self.seen[phase] = time.monotonic()


def has_rust() -> bool:
    """Whether the front end in Rust is here; says where it was looked for."""
    try:
        front_program("vllm-rs")
    except SettingsError as error:
        tell(f"without vllm-rs: {error}")
        return False
    return True


@contextmanager
def served(model: ModelSpec, front: Front = "vllm") -> Iterator[Server]:
    """Start a server; it is up after `Server.wait_until_healthy`."""
    with (
        tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder,
        _started(model, Path(folder), front) as server,
    ):
        yield server


@contextmanager
def _started(model: ModelSpec, folder: Path, front: Front) -> Iterator[Server]:
    port, log = free_port(), folder / "serve.log"
    # The program of this interpreter, whatever else is on the PATH.
    own = Path(sys.executable).parent / front
    program = str(own) if front == "vllm" else front_program(front)
    command = [program, "serve", model.path, "--host", HOST, "--port", str(port)]
    command += [*_options(model), *_OPTIONS[front]]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["VLLM_RS_PYTHON"] = sys.executable
    # A worker's class may be one of ours.
    environment |= named_vllm(folder)
    paths = [*filter(None, [environment.get("PYTHONPATH")]), str(_ROOT)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = start_child(command, log, env=environment)
    try:
        yield Server(process, log, port)
    finally:
        stop_child(process, _STOP_S)


def _options(model: ModelSpec) -> list[str]:
    """The model's settings as options of `vllm serve`."""
    return [
        word
        for name, value in engine_arguments(model).items()
        if name != "model"
        for word in _option(f"--{name.replace('_', '-')}", value)
    ]


def _option(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]


def _stream(port: int, task: Task) -> Iterator[str]:
    """Yield the pieces of a completion as they arrive."""
    question = {
        "model": task.model.name,
        "prompt": task.prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    response = ask(port, "POST", "/v1/completions", question)
    if response.status != http.client.OK:
        raise ConnectionError(f"vllm serve answered {response.status}: {response.read()!r}")
    for line in response:
        words = line.decode().strip().removeprefix("data: ")
        if words and words != "[DONE]":
            yield json.loads(words)["choices"][0]["text"]


def ask(port: int, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
    """Make one HTTP request."""
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    packed = None if body is None else json.dumps(body)
    connection.request(method, path, packed, {"Content-Type": "application/json"})
    return connection.getresponse()
