"""A yard on the device for tests that kill processes: two processes, one awake at a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.sums import questions
from tests.crash.life_yard import MAX_MODEL_WAIT_S, LifeYard
from tests.engines.llama import counted
from tests.gpu.device import GIB, Device
from tests.gpu.specs import ADDERS
from tests.support.builders import make_request
from tests.support.processes import Answer, Program
from tests.support.waiting import eventually
from tokenyard.protocol.control import Command
from tokenyard.protocol.wire import Request, SamplingParams, unpack_tokens

PROCESSES = 2
#: A busy engine gives way after this many seconds.
DRAIN_S = 2.0
#: Longest wait on a GPU: for a start, and for a later event, in seconds.
START_S = 150.0
WAIT_S = 60.0
#: Seconds after which the processes of a dead host are no longer shown.
LEASE_MS = 6_000

MODELS = """
[defaults]
dtype = "bfloat16"
max_num_seqs = 16
enforce_eager = true
kv_cache_gib = {kv_cache_gib}

[models.red]
path = "{models}/llama-counts"

[models.blue]
path = "{models}/qwen3-counts"

[models.random]
path = "{models}/llama"

[models.adder]
path = "{adder}"
"""


class GpuYard(LifeYard):
    """A yard with vLLM's engines on the device under test."""

    def __init__(self, url: str, device: Device, models: Path) -> None:
        super().__init__(url)
        self.wait_s = device.patience * START_S
        self.device = device
        #: Tokens of a stream that takes seconds.
        self.long = 1500 if device.is_gpu else 240
        self._models = models
        self._host: Program | None = None
        self.empty = 0  # bytes in use while all processes are warm and have held no model

    def open(self) -> None:
        """Start the yard, and wait until its processes are warm."""
        self.coordinator(max_model_wait_s=MAX_MODEL_WAIT_S)
        self.open_host()

    def open_host(self) -> None:
        """Start the host, and wait until its processes are warm."""
        self.wait_s = self.device.patience * START_S
        self._host = self.pool(sleepers=PROCESSES - 1)
        self.clear()
        self.empty = self.used()
        self.wait_s = self.device.patience * WAIT_S

    def pool(self, **options: object) -> Program:
        """Start a host that may load all `MODELS`."""
        text = MODELS.format(
            models=self._models, adder=ADDERS / "adder", kv_cache_gib=self.device.kv_cache_gib
        )
        known: dict[str, object] = {
            "engine": "vllm",
            "device": self.device.name,
            "drain_timeout_s": DRAIN_S,
            "lease_ms": LEASE_MS,
            "max_backoff_s": 1.0,
            "leak_tolerance": 1.0,
            "leak_floor_mib": 2048.0,
        }
        return self.host(self.write("models.toml", text), **known | options)

    @property
    def host_program(self) -> Program:
        """The controller."""
        assert self._host is not None
        return self._host

    # Requests

    def make(self, model: str, count: int, max_tokens: int) -> list[Request]:
        """Greedy streams of a counting model."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return [
            make_request(tokens=[4, 10 * n + 4], model=model, stream=True, params=params)
            for n in range(count)
        ]

    def expected(self, request: Request) -> list[int]:
        """The tokens that a counting model generates."""
        assert request.tokens is not None
        return counted(unpack_tokens(request.tokens), request.params.max_tokens or 0)

    def answer_all(self, requests: Sequence[Request]) -> list[Answer]:
        """Submit the requests and return their answers; each token of a stream came once."""
        self.push_all(requests)
        return self.answers(requests)

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to these requests; each has exactly one result."""
        self.results(requests, timeout_s=self.wait_s)
        found = [self.answer(request.id) for request in requests]
        for answer in found:
            assert answer.result.ok, answer.result.error
            answer.check_stream()
        return found

    # Processes

    def used(self) -> int:
        """Bytes of the device that are in use."""
        return self.device.used([one.pid for one in self.host_program.children()])

    def clear(self) -> None:
        """Unload all models."""

        def cleared() -> bool:
            for worker, info in self.roster().items():
                if info.state in ("ready", "asleep"):
                    why = "the test begins again"
                    self.scripts.command(Command(verb="unload", worker=worker, why=why))
            return self.states(self.host_program) == ["warm"] * PROCESSES

        eventually(cleared, timeout_s=self.wait_s, every_s=0.3)

    def check_well(self) -> None:
        """Check: one answer each, all processes back, both models served; then unload all."""
        self.check_all()
        self.check_whole(self.host_program, PROCESSES)
        for model in ("red", "blue"):
            self.ask(model, 2, max_tokens=5)
        self.check_all()
        self.clear()
        self.check_empty()

    def check_empty(self) -> None:
        """Check that the device has its memory back, up to half a cache."""
        most = self.empty + int(self.device.kv_cache_gib * GIB / 2)

        def settled() -> bool:
            used = self.used()
            assert used <= most, f"{(used - self.empty) >> 20} MiB more than at first"
            return True

        eventually(settled, timeout_s=20.0, every_s=0.1)

    def told(self) -> str:
        """All processes in words."""
        said = [
            f"{one.pid} {one.state} {one.model} {one.last_error}" for one in self.roster().values()
        ]
        return "; ".join(said) or "no worker is in the roster"

    def stop(self, pid: int) -> None:
        """Stop a process until it is killed."""
        os.kill(pid, signal.SIGSTOP)


@contextmanager
def running_yard(url: str, device: Device, models: Path) -> Iterator[GpuYard]:
    """A yard whose processes are warm."""
    with GpuYard(url, device, models) as yard:
        yard.open()
        yield yard


def sums(model: str, count: int) -> tuple[list[Request], list[str]]:
    """Streams of sums that continue after the answer, and the answers."""
    asked = questions(["adder"], count)
    params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    requests = [
        make_request(prompt=one.prompt, model=model, stream=True, params=params) for one in asked
    ]
    return requests, [one.answer for one in asked]
