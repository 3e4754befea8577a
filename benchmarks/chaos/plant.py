"""The processes of a chaos run: broker, coordinators, controllers with their workers, gateways."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import redis

from benchmarks.chaos.accounts import Accounts, read_accounts
from benchmarks.chaos.broker import Broker
from benchmarks.chaos.faults import Part
from benchmarks.chaos.history import Key
from benchmarks.chaos.http_reader import bearer
from benchmarks.chaos.program import Program
from benchmarks.chaos.record import request_of
from benchmarks.chaos.targets import NOBODY, WorkerProcess, find_workers
from benchmarks.cold_start.serve import HOST
from benchmarks.device import on_gpu
from benchmarks.yard import ServerName
from tokenyard import Client
from tokenyard.ops.keys import create_key
from tokenyard.process.embedded_broker import free_port
from tokenyard.protocol.api_keys import ApiKey
from tokenyard.protocol.errors import TransientError
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.settings import EngineName
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.worker_info import WorkerInfo
from tokenyard.yard.reads import intakes

COORDINATORS: Final = 2
CONTROLLERS: Final = 2
GATEWAYS: Final = 2
MAX_NUM_SEQS: Final = 64
#: Seconds per simulated token, so that streams last long enough to be hit.
STEP_S: Final = 0.04
ADDER: Final = Path(__file__).parents[2] / "examples" / "arithmetic" / "models" / "adder"
START_TIMEOUT_S: Final = 240.0
#: Here several engines share a device, even a GPU, and die while others start.
_MEMORY: Final = {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": 64 * 1024**2}
#: The injector kills at random, so a worker's death does not incriminate its requests.
_ACQUITTAL: Final = [
    *("--max-crashes", 1000),
    *("--max-crashed-alone", 1000),
    *("--max-lost-alone", 1000),
]
_COMPILE_S: Final = 15.0
_POLL_S: Final = 0.05
#: Seconds until a yard whose clients are gone has ended what they left.
_REST_S: Final = 30.0
#: What the owners of all requests of gateways begin with.
HTTP_CLIENT: Final = "http"
_BUSY_STREAMS: Final = 4
#: A gateway that is not stopped answers sooner.
_PROBE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Leases and other settings that determine how soon a fault is noticed."""

    worker_lease_ms: int = 2_000
    leader_lease_ms: int = 1_000
    hang_timeout_s: float = 3.0
    grace_s: float = 2.0
    gateway_grace_s: float = 0.5


#: The programs' defaults.
DEFAULTS: Final = Timing(
    worker_lease_ms=30_000,
    leader_lease_ms=5_000,
    hang_timeout_s=60.0,
    grace_s=30.0,
    gateway_grace_s=30.0,
)


def _cores(host: int) -> Collection[int]:
    """The host's share of the cores, so that hosts disturb each other little."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[host::CONTROLLERS] or cores


class Plant:
    """All processes of one yard, and its clients."""

    def __init__(
        self,
        server: ServerName,
        engine: EngineName,
        yard: str,
        folder: Path,
        timing: Timing,
        *,
        has_gateways: bool = False,
        tenants: Mapping[str, TenantSettings] = MappingProxyType({}),
    ) -> None:
        """With ``tenants``, gateways serve only them."""
        self.yard = yard
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        self.broker = Broker(server, folder / "broker")
        self.coordinators: list[Program] = []
        self.controllers: list[Program] = []
        self.gateways: list[Program] = []
        self.ports = [free_port() for _ in range(GATEWAYS if has_gateways else 0)]
        self.clients: list[Program] = []
        #: A key of each tenant; of no tenant, where gateways need none, "".
        self.api_keys: dict[str, str] = {}
        self._tenants = tenants
        self._engine: EngineName = engine
        self._timing = timing
        self._roster: dict[bytes, bytes] = {}

    @property
    def workers_wanted(self) -> int:
        """Number of worker processes while nothing is broken."""
        return CONTROLLERS * self._slots

    @property
    def _slots(self) -> int:
        return 2 if self._engine == "simulated" else 1

    @property
    def _hang_timeout_s(self) -> float:
        """Longer on a GPU, where the first request waits for the compilation of kernels."""
        is_slow = self._engine == "vllm" and on_gpu()
        return (
            max(_COMPILE_S, self._timing.hang_timeout_s) if is_slow else self._timing.hang_timeout_s
        )

    def start(self) -> None:
        """Start everything and wait until all workers serve."""
        self.broker.start()
        self._set_tenants()
        timing = self._timing
        for number in range(COORDINATORS):
            options = ["--lease-ms", timing.leader_lease_ms, *_ACQUITTAL]
            self.coordinators.append(self._program("coordinator", f"coordinator-{number}", options))
        shared = ["--lease-ms", timing.worker_lease_ms, "--hang-timeout-s", self._hang_timeout_s]
        shared += ["--grace-s", timing.grace_s, "--backoff-s", 0.1, "--max-backoff-s", 1.0]
        shared += ["--slots", self._slots, "--max-num-seqs", MAX_NUM_SEQS, *self._engine_options()]
        for number in range(CONTROLLERS):
            cores = _cores(number) if self._engine == "vllm" else ()
            self.controllers.append(self._program("worker", f"host-{number}", shared, cores))
        for number, port in enumerate(self.ports):
            options = ["--host", HOST, "--port", port, "--keep-alive-s", 1.0]
            options += ["--grace-s", timing.gateway_grace_s]
            options += ["--keys", "required" if self._tenants else "off"]
            self.gateways.append(self._program("gateway", f"gateway-{number}", options))
        for program in (*self.coordinators, *self.controllers, *self.gateways):
            program.start()
        self.wait_for_workers()
        self._wait_for_gateways()

    def _engine_options(self) -> list[object]:
        if self._engine == "simulated":
            # Gateways need a tokenizer.
            model = ["--model", ADDER] if self.ports else []
            return ["--engine", "simulated", "--simulated-step-s", STEP_S, *model]
        engine = ["--engine", "vllm", "--model", ADDER, "--enforce-eager"]
        return [*engine, "--engine-args", json.dumps(_MEMORY)]

    def _program(
        self, module: str, name: str, options: Sequence[object], cores: Collection[int] = ()
    ) -> Program:
        place = ["--redis-url", self.broker.url, "--yard", self.yard, "--name", name]
        command = [sys.executable, "-m", module, *place, *map(str, options)]
        return Program(name, command, self.logs / f"{name}.log", cores)

    def start_clients(self, commands: Iterable[Sequence[str]]) -> None:
        """Start one client per command line."""
        for number, command in enumerate(commands):
            log = self.logs / f"client-{number}.log"
            program = Program(f"client-{number}", command, log, ())
            self.clients.append(program)
            program.start()

    def programs(self, part: Part) -> Sequence[Program]:
        """The programs of one part; for hosts and worker processes, their controllers."""
        if part == "client":
            return self.clients
        if part == "gateway":
            return self.gateways
        return self.coordinators if part == "coordinator" else self.controllers

    def workers(self) -> list[WorkerProcess]:
        """The live worker processes in the roster, or in its last known version."""
        with contextlib.suppress(redis.RedisError), self._connection(socket_timeout=0.5) as broker:
            self._roster = broker.hgetall(Keys(self.yard).workers)
        return find_workers(self._roster, self._host_of)

    def is_streaming(self, worker: WorkerProcess) -> bool:
        """Whether this worker has published part of an answer that it has not finished."""
        keys = Keys(self.yard)
        with contextlib.suppress(redis.RedisError), self._connection(socket_timeout=0.5) as broker:
            lane = [fields for _, fields in broker.xrange(keys.lane(worker.worker))]
            running = [keys.tokens(*request_of(fields)) for fields in lane if b"id" in fields]
            return bool(running and broker.exists(*running))
        return False

    def has_http_streams(self) -> bool:
        """Whether several requests of gateways have published tokens and are not finished."""
        found: list[object] = []
        pattern = Keys(self.yard).tokens(f"{HTTP_CLIENT}*", "*")
        with contextlib.suppress(redis.RedisError), self._connection(socket_timeout=0.5) as broker:
            found = list(broker.scan_iter(pattern, count=5000))
        return len(found) >= _BUSY_STREAMS

    def _host_of(self, pid: int) -> str:
        return next((one.name for one in self.controllers if one.has_started(pid)), NOBODY)

    def _connection(self, socket_timeout: float) -> redis.Redis:
        return redis.Redis.from_url(self.broker.url, socket_timeout=socket_timeout, retry=None)

    def answers(self, gateway: Program) -> bool:
        """Whether a gateway serves."""
        return self._get(self.ports[self.gateways.index(gateway)], "/livez") == {}

    def _wait_for_gateways(self) -> None:
        """Wait until all gateways list the model; raises `TimeoutError`."""
        until = time.monotonic() + START_TIMEOUT_S
        for port in self.ports:
            while ADDER.name not in json.dumps(self._get(port, "/v1/models")):
                if time.monotonic() > until:
                    raise TimeoutError(f"no gateway in {START_TIMEOUT_S:g} s")
                time.sleep(_POLL_S)

    def _get(self, port: int, path: str) -> object:
        """What a gateway answers; None if it is not there."""
        connection = http.client.HTTPConnection(HOST, port, timeout=_PROBE_S)
        headers = bearer(next(iter(self.api_keys.values())))
        with contextlib.suppress(OSError, http.client.HTTPException), closing(connection):
            connection.request("GET", path, headers=headers)
            return json.loads(connection.getresponse().read())
        return None

    def wait_for_workers(self) -> None:
        """Wait until all workers serve; raises `TimeoutError`."""
        self._wait(lambda _: True)

    def wait_for_tokens(self) -> None:
        """Wait until all workers have streamed tokens; raises `TimeoutError`."""
        self._wait(lambda worker: worker.tally.tokens > 0)

    def _wait(self, is_so: Callable[[WorkerInfo], bool]) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        count = 0
        with Client(self.broker.url, yard=self.yard, connect_timeout_s=START_TIMEOUT_S) as client:
            while time.monotonic() < until:
                with contextlib.suppress(TransientError):
                    count = sum(map(is_so, client.info().workers.values()))
                if count >= self.workers_wanted:
                    return
                time.sleep(_POLL_S)
        raise TimeoutError(f"{count} of {self.workers_wanted} workers in {START_TIMEOUT_S:g} s")

    def trim_intakes(self) -> list[Key]:
        """Delete waiting entries that have a ledger from the intakes; returns their requests.

        An entry from a plain XADD that the coordinator has not seen has no ledger: only its client
        knows it, and would have to send it again.
        """
        keys, found = Keys(self.yard), []
        with self._connection(socket_timeout=10.0) as broker:
            for _, name in intakes(Yard(broker, keys)):
                for entry, fields in broker.xrange(keys.intake(name)):
                    key = request_of(fields)
                    if broker.exists(keys.ledger(*key)) and broker.xdel(keys.intake(name), entry):
                        found.append(key)
        return found

    def _set_tenants(self) -> None:
        """Set tenants, and make their keys, as an operator does."""
        keys = Keys(self.yard)
        self.api_keys = {} if self._tenants else {"": ""}
        with self._connection(socket_timeout=10.0) as broker:
            for name, settings in self._tenants.items():
                broker.hset(keys.tenants, name, encode_tenant(settings))
                self.api_keys[name], _ = create_key(Yard(broker, keys), ApiKey(tenant=name))

    def accounts(self) -> Accounts:
        """What the yard counts for its tenants, as soon as it is at rest, or after a while."""
        until = time.monotonic() + _REST_S
        with self._connection(socket_timeout=10.0) as broker:
            while True:
                accounts = read_accounts(Yard(broker, Keys(self.yard)))
                if accounts.is_at_rest or time.monotonic() > until:
                    return accounts
                time.sleep(_POLL_S)

    def left_over(self) -> int:
        """Number of entries in the intakes and lanes; 0 once all requests are answered."""
        with redis.Redis.from_url(self.broker.url, socket_timeout=10.0) as connection:
            pattern = f"tokenyard:{{{self.yard}}}:*"
            streams = connection.scan_iter(pattern, count=1000, _type="stream")
            held = [key for key in streams if b"}:intake:" in key or b"}:lane:" in key]
            return sum(connection.xlen(key) for key in held)

    def stop(self) -> None:
        """End everything; idempotent."""
        for program in (*self.clients, *self.gateways, *self.controllers, *self.coordinators):
            program.end()
        self.broker.stop()
