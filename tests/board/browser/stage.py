"""A live yard with something of everything: real vLLM for one model, simulated engines for others.

Everything on it is done as users do it: requests are submitted, tenants set, keys created. Names
are those of a plausible yard, since its pages are also the pictures of docs/board.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.batch.running import batch, start
from tests.board.browser.past import write_hour
from tests.gateway.speaker import MAX_LEN, write_speaker
from tests.support.api_keys import create_key
from tests.support.builders import entry_fields, make_request, random_name
from tests.support.processes import Plant
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.ops.audit import AuditEntry, record
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order, worker_scope
from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.wire import Request, SamplingParams

#: What the simulated host may load.
_MODELS: Final = """
[models."llama-3.1-8b"]
path = "meta/llama-3.1-8b"
max_num_seqs = 8

[models."qwen3-32b"]
path = "qwen/qwen3-32b"
max_num_seqs = 4
tensor_parallel_size = 2

[models."mistral-7b"]
path = "mistral/mistral-7b"
max_num_seqs = 8
"""
_SPEAKER: Final = """
[models.speaker]
path = "{path}"
max_model_len = {length}
dtype = "float32"
max_num_seqs = 8
enforce_eager = true
kv_cache_gib = 0.125
"""
#: Time for vLLM to be imported on busy cores, and a model to be loaded.
READY_S: Final = 300.0
#: Reasons of dead letters, as the leader writes them.
_DEATHS: Final = (
    ("batch-0117", "llama-3.1-8b", "POISONED: 2 workers crashed while it ran alone"),
    ("batch-0311", "llama-3.1-8b", "POISONED: 2 workers crashed while it ran alone"),
    ("web-7f31", "qwen3-32b", "INFERENCE_ERROR: failed 3 times: device-side assert triggered"),
)
#: What operators have done, for the audit.
_DONE: Final = (
    AuditEntry(
        who="3f2a91 on call",
        role="operator",
        action="request.cancel",
        target="web/web-0007",
        why="the user asked for it",
        text="1 request is being cancelled.",
    ),
    AuditEntry(
        who="ops@gw",
        role="admin",
        action="dead.requeue",
        target="dead letters of llama-3.1-8b",
        why="fixed by the new driver",
        text="17 dead letters requeued.",
    ),
)
TENANTS: Final = {
    "research": TenantSettings(weight=4.0, tokens_per_day=50_000_000),
    "product": TenantSettings(weight=2.0, max_running_requests=64),
    "free": TenantSettings(max_tokens=4096, tokens_per_minute=100_000, classes=["low"]),
}


class Stage:
    """The yard. `start` returns before vLLM serves; `speak` waits for that.

    ``spoken`` is the last request that vLLM has got.
    """

    def __init__(self, broker: Server, folder: Path, name: str = "") -> None:
        self.plant = Plant(broker.url, name)
        self.url = broker.url
        self.yard = self.plant.keys.yard
        self.spoken = ""
        self._flows = 0
        self._folder = folder
        self._workers: list[subprocess.Popen[bytes]] = []

    def start(self, *, with_vllm: bool) -> None:
        """Start the processes."""
        write_hour(self.plant.connection, self.plant.keys)
        for name in ("coordinator-a", "coordinator-b"):
            self.plant.coordinator(name=name, max_model_wait_s=0.2)
        models = self._folder / "models.toml"
        models.write_text(_MODELS)
        # As slow as a large model, so that there is something to see.
        speed = {"simulated_step_s": 0.04, "simulated_load_s": 0.5, "simulated_prefill_rate": 4000}
        self.plant.host(models, name="gpu-a", slots=6, sleepers=1, **speed)
        if with_vllm:
            speaker = write_speaker(self._folder / "speaker")
            of_vllm = self._folder / "vllm.toml"
            of_vllm.write_text(_SPEAKER.format(path=speaker, length=MAX_LEN))
            self.plant.host(of_vllm, name="cpu-b", engine="vllm", device="cpu", slots=1)
        self.plant.wait_for_leader()
        for tenant, settings in TENANTS.items():
            self.set_tenant(tenant, settings)

    def set_tenant(self, tenant: str, settings: TenantSettings) -> None:
        """Set a tenant as an operator does."""
        keys = self.plant.keys
        self.plant.connection.hset(keys.tenants, tenant, encode_tenant(settings))
        self.plant.connection.xadd(keys.events, {"event": "tenants"})

    def fill(self) -> None:
        """Requests, dead letters and batches, and what operators have done."""
        self.plant.results(self.submit("llama-3.1-8b", 12, 8, client="web", tenant="product"))
        self.flow()
        create_key(self.plant, "product", models=["llama-3.1-8b"], classes=["high", "normal"])
        create_key(self.plant, "free", models=["mistral-7b"], classes=["low"])
        create_key(self.plant, "ops", name="on call", role="operator")
        order = Order(signal="PAUSE", scope=worker_scope("gpu-a-5"), why="new driver", by="ops@gw")
        Signals(self.plant).give(order)
        for request_id, model, reason in _DEATHS:
            self.bury(request_id, model, reason)
        for entry in _DONE:
            record(self.plant, entry)
        self.submit_batch("summaries", 40, "mistral-7b", '{"custom_id": "x", "body": 1}\n')
        self._workers.append(start(self.plant, self._folder / "batch.log", "worker"))

    def flow(self) -> None:
        """Requests that run for a while, and others that wait for them."""
        self._flows += 1
        self.submit("llama-3.1-8b", 9, 1500, client="web", tenant="product")
        self.submit("qwen3-32b", 2, 1500, client="agents", tenant="research")
        self.submit("llama-3.1-8b", 30, 800, client="nightly", tenant="research")
        self.submit("mistral-7b", 14, 800, "low", client="trial", tenant="free")
        self.submit_batch(f"evaluation-{self._flows}", 120, "llama-3.1-8b")

    def bury(self, request_id: str, model: str, reason: str, **fields: Any) -> str:
        """Write a dead letter; its name."""
        client = fields.pop("client", "nightly")
        request = make_request(request_id, client=client, model=model, tokens=range(1, 61))
        told = {b"dead_reason": reason.encode(), b"dead_sid": b"low/1-0", b"crashes": b"2"}
        letter = entry_fields(request, **fields) | told
        added: Any = self.plant.connection.xadd(self.plant.keys.dead, letter)
        return bytes(added).decode()

    def fail(self, request_id: str) -> str:
        """Have a request fail as one that crashed its workers; its id."""
        keys, connection = self.plant.keys, self.plant.connection
        letter = self.bury(request_id, "mistral-7b", "POISONED: it ran alone", client="web")
        ended = letter.partition("-")[0]
        state = {"state": "failed", "sid": "normal/1-0", "ended": ended}
        connection.hset(keys.ledger("web", request_id), mapping=state)
        return request_id

    def submit_batch(self, name: str, lines: int, model: str, more: str = "") -> None:
        """Submit a file as users do."""
        asked = [
            {"id": f"{name}-{at}", "tokens": [1, 2, 3], "max_tokens": 50} for at in range(lines)
        ]
        path = self._folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in asked) + more)
        output = self._folder / f"{name}.out.jsonl"
        done = batch(self.plant, "submit", path, "-o", output, "--model", model)
        assert done.returncode == 0, done.stderr

    @contextmanager
    def held(self) -> Iterator[None]:
        """vLLM generates nothing in this block, which must be shorter than a lease."""
        (info,) = (one for one in self.plant.roster().values() if one.name == "cpu-b")
        os.kill(info.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(info.pid, signal.SIGCONT)

    @contextmanager
    def writing(self) -> Iterator[str]:
        """vLLM is in the middle of a text, and stays there in this block; the request's id."""
        for _ in range(10):
            request_id = self.speak()
            with self.held():
                if self.plant.ledger(request_id, "web")["state"] == "assigned":
                    yield request_id
                    return
        raise AssertionError("each text had ended before a slow machine stopped vLLM")

    def _names(self) -> set[str]:
        return {one.name for one in self.plant.roster().values()}

    def stop(self) -> None:
        """End what `Plant` does not know."""
        for worker in self._workers:
            worker.terminate()
            worker.wait()

    def submit(
        self,
        model: str,
        count: int,
        max_tokens: int,
        priority_class: PriorityClass = "normal",
        **fields: Any,
    ) -> list[Request]:
        """Streams of a model."""
        params = SamplingParams(max_tokens=max_tokens)
        requests = [
            make_request(
                f"{fields['client']}-{self._flows}{number:03d}",
                tokens=list(range(1, 100 + 7 * number)),
                model=model,
                stream=True,
                params=params,
                **fields,
            )
            for number in range(count)
        ]
        self.plant.push_all(requests, priority_class)
        return requests

    def speak(self, max_tokens: int = 900) -> str:
        """Have vLLM write a long text, and wait for its first tokens; the request's id."""
        eventually(lambda: "cpu-b" in self._names(), timeout_s=READY_S)
        self.spoken = request_id = random_name("story")
        request = make_request(
            request_id,
            prompt="abc",
            model="speaker",
            client="web",
            stream=True,
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )
        self.plant.push(request)
        eventually(lambda: self.plant.published(request_id, "web") >= 3, timeout_s=READY_S)
        return request_id


@contextmanager
def staged(broker: Server, folder: Path, *, with_vllm: bool, name: str = "") -> Iterator[Stage]:
    """A yard that ends with the block."""
    stage = Stage(broker, folder, name)
    with stage.plant:
        stage.start(with_vllm=with_vllm)
        try:
            yield stage
        finally:
            stage.stop()
