"""A yard with real vLLM, and gateways before it; and vLLM's own server beside it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.media_models import write_picture_model, write_sound_model
from benchmarks.pooling_models import Kind, write_pooling_model
from tests.gateway.forked import ForkedGateway
from tests.gateway.speaker import MAX_LEN, write_speaker
from tests.support.processes import ROOT, Plant, Program
from tests.support.servers import Server, free_port
from tests.support.waiting import eventually

#: Models that pool, which have the names of their kinds.
POOLING: tuple[Kind, ...] = ("bert", "cross")
MODELS = ROOT / "examples" / "arithmetic" / "models"
NAMES = ("adder", "subtractor", "speaker")
#: Time for vLLM to be imported on busy cores, and a model to be loaded.
READY_S = 300.0
#: Arguments of `vllm serve` for the speaker, in the models file and for vLLM's own server.
SERVE_ARGS: Mapping[str, Any] = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "enable_prompt_tokens_details": True,
    "fingerprint_mode": "custom",
    "fingerprint_value": "the speaker",
}
#: Settings of both models, by vLLM's names.
_ENGINE = {"dtype": "float32", "max_num_seqs": 64}


class Door:
    """A gateway's process, forked from one with vLLM unless the whole program is to be tested."""

    def __init__(
        self, plant: Plant, models: set[str], *, is_forked: bool = True, **options: object
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._plant = plant
        self._models = models
        self._options = {"port": self.port, **options}
        self._kind = ForkedGateway if is_forked else Program
        self.program = self._run()

    def _run(self) -> Program:
        return self._plant._start("gateway", self._options, self._kind)

    def wait(self, key: str = "") -> None:
        """Wait until it serves; with a key, where it asks for one."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        eventually(lambda: self._answers(headers), timeout_s=READY_S, every_s=0.1)

    def _answers(self, headers: Mapping[str, str]) -> bool:
        assert self.program.is_running, self.program.log[-3000:]
        with contextlib.suppress(httpx.TransportError):
            found = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=60.0).json()["data"]
            return self._models <= {one["id"] for one in found}
        return False

    def kill_and_start(self) -> None:
        """SIGKILL, then a new process on the same port; `wait` for it."""
        self.program.kill()
        self.program = self._run()


class Stand:
    """One yard: two coordinators, two gateways, and one worker with a spare process."""

    def __init__(self, broker: Server, folder: Path) -> None:
        self.plant = Plant(broker.url)
        self.speaker = write_speaker(folder / "speaker")
        self.files = folder / "files"
        self._models = folder / "models.toml"
        self.pooling = {kind: write_pooling_model(kind, folder / kind) for kind in POOLING}
        self.pictures = write_picture_model(folder / "pictures")
        self.sound = write_sound_model(folder / "sound")
        more = {**self.pooling, "pictures": self.pictures, "sound": self.sound}
        self._models.write_text(_models_file(self.speaker, more))
        self._doors: list[Door] = []
        self.coordinators: list[Program] = []
        self.own_server: OwnServer | None = None

    def start(self) -> None:
        """Start everything; gateways and models are waited for when they are needed."""
        for _ in range(2):
            self.start_coordinator()
        options = {"slots": 1, "spares": 1, "max_backoff_s": 1.0, "leak_tolerance": 1.0}
        self.host = self.plant.host(self._models, engine="vllm", device="cpu", **options)
        self.site_port = free_port()
        settings = {
            "files_dir": self.files,
            "allowed_media_domains": f"127.0.0.1:{self.site_port}",
        }
        self._doors = [Door(self.plant, set(NAMES), **settings) for _ in range(2)]
        eventually(
            lambda: len([1 for one in self.plant.roster().values() if one.state == "warm"]) == 2,
            timeout_s=READY_S,
        )

    def start_coordinator(self) -> None:
        """One more, which leads or stands by."""
        number = len(self.coordinators)
        name = f"coordinator-{number}"
        self.coordinators.append(self.plant.coordinator(name=name, lease_ms=15_000))

    def kill_leader(self) -> None:
        """SIGKILL the coordinator that leads, and have its lease end."""
        self.leader().kill()
        self.plant.connection.delete(self.plant.keys.leader)

    def door(self, number: int = 0) -> Door:
        """A gateway that serves."""
        self._doors[number].wait()
        return self._doors[number]

    def port(self, number: int) -> int:
        """The port of a gateway, which may be starting."""
        return self._doors[number].port

    def wait_until_whole(self) -> None:
        """Wait until everybody is there whom a test may kill."""
        self.plant.wait_for_leader()
        for door in self._doors:
            door.wait()

    def kill_worker(self) -> None:
        """SIGKILL the process that holds a model; its spare takes over."""
        (busy,) = self._busy()
        os.kill(busy, signal.SIGKILL)

    @contextmanager
    def stopped_worker(self) -> Iterator[None]:
        """Nothing is generated in this block, which must be shorter than a lease."""
        pids = self._busy()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def _busy(self) -> list[int]:
        return [one.pid for one in self.plant.roster().values() if one.state == "ready"]

    def forget(self, durable_id: str) -> None:
        """Let the queue forget an answer, but not the gateway's record of the request."""
        connection = self.plant.connection
        found = list(connection.scan_iter(match=f"*{durable_id}*", count=1000))
        answers = [key for key in found if b":http:" not in key]
        assert len(found) - len(answers) == 1, found
        if answers:
            connection.delete(*answers)

    def leader(self) -> Program:
        """The coordinator that leads."""
        term = self.plant.wait_for_leader()
        number = int(term.decode().rpartition("coordinator-")[2].partition(".")[0])
        return self.coordinators[number]


def _models_file(speaker: Path, more: Mapping[str, Path]) -> str:
    tables = "".join(f'[models.{name}]\npath = "{path}"\n\n' for name, path in more.items())
    arguments = "\n".join(f"{name} = {json.dumps(value)}" for name, value in SERVE_ARGS.items())
    return f"""{tables}
[defaults]
dtype = "{_ENGINE["dtype"]}"
max_num_seqs = {_ENGINE["max_num_seqs"]}
enforce_eager = true
kv_cache_gib = 0.125
max_model_wait_s = 0.5

[models.adder]
path = "{MODELS / "adder"}"
max_model_len = 64

[models.adder.adapters.adder-subtracts]
path = "{MODELS / "adder-subtracts"}"

[models.subtractor]
path = "{MODELS / "subtractor"}"
max_model_len = 64
engine_args.block_size = 32

[models.speaker]
path = "{speaker}"
max_model_len = {MAX_LEN}

[models.speaker.serve_args]
{arguments}
"""


@contextmanager
def running_stand(broker: Server, folder: Path, *, asks_both: bool = False) -> Iterator[Stand]:
    """A yard that ends with the block, and vLLM's own server if wanted."""
    stand = Stand(broker, folder)
    with stand.plant, contextlib.ExitStack() as stack:
        stand.start()
        if asks_both:
            stand.own_server = OwnServer(stand.speaker, folder, SERVE_ARGS, MAX_LEN)
            stack.callback(stand.own_server.stop)
        yield stand


class OwnServer:
    """vLLM's own server with one model: it starts when made, and `url` waits for it."""

    def __init__(
        self, model: Path, folder: Path, arguments: Mapping[str, Any], max_len: int
    ) -> None:
        """The model has the name of its folder; ``arguments`` are more of ``vllm serve``."""
        self._port = free_port()
        self._log = folder / "vllm.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", model.name]
        command += ["--port", str(self._port), "--host", "127.0.0.1"]
        command += ["--max-model-len", str(max_len), "--dtype", str(_ENGINE["dtype"])]
        command += ["--max-num-seqs", str(_ENGINE["max_num_seqs"]), "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(2**27)]
        for name, value in arguments.items():
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env=quiet, cwd=ROOT
            )

    @property
    def url(self) -> str:
        """Its URL, once it serves."""
        url = f"http://127.0.0.1:{self._port}"

        def answers() -> bool:
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/health", timeout=10.0).status_code == 200
            return False

        eventually(answers, timeout_s=READY_S, every_s=0.2)
        return url

    def stop(self) -> None:
        """Stop it and its engine."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
