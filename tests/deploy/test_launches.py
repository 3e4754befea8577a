"""Every command line in the files of `deploy/` runs outside a container, and the yard serves."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import redis
from openai import OpenAI

from tests.batch.running import batch
from tests.deploy.day import FOR_THE_KEEPER
from tests.deploy.launches import ORIGINS, Launch, from_systemd, with_batches
from tests.deploy.rights import denied
from tests.gateway.forked import ForkedCommand
from tests.support.api_keys import create_key
from tests.support.brokers import DEPLOY, GuardedServer
from tests.support.servers import free_port
from tests.support.vllm_rs import vllm_rs
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.protocol.gateway_settings import BridgeSettings, GatewaySettings
from tokenyard.protocol.http_settings import BoardSettings
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.protocol.settings import WorkerSettings

ADDER = DEPLOY.parent / "examples" / "arithmetic" / "models" / "adder"
START_S = 60.0
#: Time to import vLLM's front end, on busy cores.
GATEWAY_S = 300.0


class Started:
    """One process of a file, with this machine's paths in place of the file's."""

    def __init__(
        self, launch: Launch, port: int, folder: Path, number: int, *, has_vllm: bool
    ) -> None:
        self.launch = launch
        given = {
            name: value.replace("@redis:6379", f"@127.0.0.1:{port}")
            for name, value in launch.env.items()
            if name.startswith("TOKENYARD_")
        }
        # Two containers may listen on one port, two processes here may not.
        given |= {name: str(free_port()) for name in given if name.endswith("_PORT")}
        settings = f"TOKENYARD_{launch.name.upper()}_"
        self.port = given.get(f"{settings}PORT", "")
        self.metrics_port = given.get(f"{settings}METRICS_PORT", "")
        # There is no GPU here, and no model but this.
        given["TOKENYARD_WORKER_ENGINE"] = "simulated"
        given["TOKENYARD_WORKER_MODEL"] = str(ADDER)
        if "TOKENYARD_GATEWAY_FILES_DIR" in given:
            given["TOKENYARD_GATEWAY_FILES_DIR"] = str(folder / "files")
        given["HF_HUB_OFFLINE"] = "1"
        kept = {name: value for name, value in os.environ.items() if "TOKENYARD_WORKER" not in name}
        self.env = kept | given
        self._log = folder / f"{launch.name}-{number}.log"
        self.process = self._forked() if has_vllm else self._new()

    def _new(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tokenyard", *self.launch.argv]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=DEPLOY.parent,
            )  # fmt: skip

    def _forked(self) -> ForkedCommand:
        return ForkedCommand(self.launch.argv, self._log, self.env)

    @property
    def is_running(self) -> bool:
        if isinstance(self.process, ForkedCommand):
            return self.process.is_running
        return self.process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


class Site:
    """All processes that one kind of file starts."""

    def __init__(self, launches: list[Launch], folder: Path) -> None:
        self.launches = {launch.name: launch for launch in launches}
        self.folder = folder
        self.server = self._redis(self.launches.pop("redis"))
        self.bridge = self.launches.pop("bridge", None)  # needs a front end of vLLM
        self.started: list[Started] = []

    def _redis(self, launch: Launch) -> GuardedServer:
        script, *options = launch.argv
        assert Path(script).name == "start-redis.sh"
        server = GuardedServer("valkey", self.folder, ["worker"])
        places = {options[options.index("--dir") + 1]: str(self.folder)}
        words = [places.get(word, word) for word in options]
        env = [f"{name}={value}" for name, value in launch.env.items() if name != "FOLDER"]
        # This test's server replaces the image's; the other options are the file's.
        given = [word for word in server._command if word.startswith(("SERVER=", "FOLDER="))]
        server._command = ["env", *env, *given, str(DEPLOY / "start-redis.sh"), *words]
        server._command += ["--port", str(server.port), "--bind", "127.0.0.1"]
        return server

    @property
    def gateways(self) -> list[Started]:
        return self._of("gateway")

    @property
    def boards(self) -> list[Started]:
        return self._of("board")

    def _of(self, service: str) -> list[Started]:
        return [one for one in self.started if one.launch.name == service]

    def start(self, name: str, *, has_vllm: bool = False) -> None:
        """Start a service; with ``has_vllm``, forked from a process that has imported it."""
        launch, port = self.launches[name], self.server.port
        for number in range(launch.copies):
            self.started.append(Started(launch, port, self.folder, number, has_vllm=has_vllm))

    def close(self) -> None:
        for one in self.started:
            # vLLM inspects models in processes of their own, which outlive a kill for seconds.
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(one.process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
            one.process.kill()
            one.process.wait()
            sys.stderr.write(f"--- {one.launch.name}\n{one.log[-3000:]}\n")
        self.server.stop()


@pytest.fixture(params=list(ORIGINS))
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with serving(ORIGINS[request.param](), tmp_path) as site:
        yield site


@pytest.fixture(params=list(ORIGINS))
def site_with_batches(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    pytest.importorskip("vllm", reason="the gateway's front end is vLLM's")
    with serving(with_batches(request.param, tmp_path), tmp_path) as site:
        yield site


@contextmanager
def serving(launches: list[Launch], folder: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        site = Site(launches, folder)
        stack.callback(site.close)
        site.server.start()
        yield site


def batch_job(site: Site) -> None:
    """Submit a batch job as an operator, and wait for its end."""
    source, output = site.folder / "in.jsonl", site.folder / "out.jsonl"
    source.write_text('{"id": "1", "tokens": [1]}\n{"id": "2", "tokens": [2]}\n')
    place: Any = SimpleNamespace(url=site.server.url_of("batch"), keys=Keys("main"))

    def run(*words: object) -> str:
        done = batch(place, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    job = run("submit", source, "-o", output)
    state = json.loads(run("status", job, "--wait", "--timeout", 50, "--json"))
    assert state["status"] == "completed"
    assert len(output.read_text().splitlines()) == 2


def batch_by_http(site: Site, gateway: Started) -> None:
    """Run a batch as OpenAI's clients do, with one key."""
    with redis.Redis.from_url(site.server.url_of("admin")) as admin:
        key, _ = create_key(Yard(admin, Keys("main")), "research")
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions",
            "body": {"model": "adder", "prompt": "12+34=", "max_tokens": 4}}  # fmt: skip
    url = f"http://127.0.0.1:{gateway.port}/v1"
    with OpenAI(base_url=url, api_key=key, timeout=START_S, max_retries=0) as sdk:
        file = sdk.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        job = sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        eventually(
            lambda: sdk.batches.retrieve(job.id).status == "completed",
            timeout_s=GATEWAY_S, every_s=0.2,
        )  # fmt: skip
        done = sdk.batches.retrieve(job.id)
        errors = done.error_file_id and sdk.files.content(done.error_file_id).text
        assert done.output_file_id, errors
        answer = json.loads(sdk.files.content(done.output_file_id).text)
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 4


def asked(one: Started, path: str, key: str = "", port: str = "") -> int:
    """The status of an answer of a gateway or the board; 0 while it does not listen."""
    url = f"http://127.0.0.1:{port or one.port}{path}"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    assert one.is_running, one.log
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def gateway_serves(site: Site, gateway: Started) -> None:
    """Wait until the gateway is ready, and ask it without a key and with one."""
    eventually(lambda: asked(gateway, "/health") == 200, timeout_s=GATEWAY_S, every_s=0.2)
    with redis.Redis.from_url(site.server.url_of("admin")) as admin:
        key, _ = create_key(Yard(admin, Keys("main")), "research")
    needs_key = "TOKENYARD_GATEWAY_HOST" in gateway.launch.env
    assert asked(gateway, "/v1/models") == (401 if needs_key else 200)
    assert asked(gateway, "/v1/models", key) == 200


def board_serves(site: Site, board: Started) -> None:
    """Wait until the board is ready, make the first key as docs/deploy.md says, and look."""
    eventually(lambda: asked(board, "/readyz", port=board.metrics_port) == 200, timeout_s=START_S)
    assert asked(board, "/livez", port=board.metrics_port) == 200
    assert asked(board, "/board/keys") == 401
    command = [sys.executable, "-m", "tokenyard", "keys", "create", "--role", "admin", "--json"]
    made = subprocess.run(
        command, env=board.env, capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr
    denied(site.server)
    for path in ("/board/", "/board/keys", "/board/audit"):
        assert asked(board, path, json.loads(made.stdout)["key"]) == 200
    # What the doctor may not read, it tells.
    refused = {line.rpartition(" ")[2] for line in denied(site.server) if "admin: " in line}
    assert refused <= FOR_THE_KEEPER


@pytest.mark.timeout(500)
def test_a_yard_of_these_files_serves_and_stops(site: Site) -> None:
    # Given all programs of the files
    for name in site.launches:
        # The gateway's front end is vLLM's.
        if name != "gateway" or importlib.util.find_spec("vllm"):
            site.start(name)

    # I expect the yard to serve,
    with Client(site.server.url_of("client"), connect_timeout_s=START_S) as client:
        assert client.submit([1, 2], model="adder", max_tokens=5).result(START_S).ok
    # batch jobs to run, where the files start a batch worker,
    if "batch" in site.launches:
        batch_job(site)
    # gateways to be ready, and to ask for keys where others can reach them,
    for gateway in site.gateways:
        gateway_serves(site, gateway)
    # the board to ask for keys everywhere, and to have the rights for its pages,
    for board in site.boards:
        board_serves(site, board)
    # and each program to end in time, with status 0, after one SIGTERM.
    for one in site.started:
        os.kill(one.process.pid, signal.SIGTERM)
    for one in site.started:
        assert one.process.wait(one.launch.stop_s) == 0, one.log


@pytest.mark.timeout(500)
def test_with_batches_a_yard_of_these_files_runs_them(site_with_batches: Site) -> None:
    # Given all programs of the files, with what batches by HTTP need
    site = site_with_batches
    for name in site.launches:
        site.start(name, has_vllm=name in ("gateway", "batch"))
    # I expect a batch to be run, and no right to be missing.
    for gateway in site.gateways[:1]:
        gateway_serves(site, gateway)
        batch_by_http(site, gateway)
    # RQ asks for the address of its worker, and does without.
    assert set(denied(site.server)) <= {"batch: toplevel command client|list"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_bridge_of_its_unit_serves_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{vllm_rs('0.32.0')}{os.pathsep}{os.environ['PATH']}")
    with serving(from_systemd(), tmp_path) as site:
        # Given the units' yard, and their bridge at ports of this machine
        assert site.bridge is not None
        port = free_port()
        argv = [str(port) if word == "8001" else word for word in site.bridge.argv]
        site.launches["bridge"] = replace(site.bridge, argv=argv)
        for name in ("coordinator", "worker", "bridge"):
            site.start(name)
        (bridge,) = site._of("bridge")

        # I expect it to be ready, to ask for keys, to answer, and to have its rights,
        eventually(
            lambda: asked(bridge, "/readyz", port=bridge.metrics_port) == 200, timeout_s=START_S
        )
        with redis.Redis.from_url(site.server.url_of("admin")) as admin:
            key, _ = create_key(Yard(admin, Keys("main")), "research")
        check_port = bridge.env["TOKENYARD_BRIDGE_KEY_CHECK_PORT"]
        assert [asked(bridge, "/", one, check_port) for one in ("", key)] == [401, 204]
        with OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=START_S, max_retries=0
        ) as sdk:
            answer = sdk.completions.create(model="adder", prompt="12+34=", max_tokens=4)
        assert answer.usage
        assert answer.usage.completion_tokens == 4
        assert not [line for line in denied(site.server) if "gateway: " in line]
        # and to end in time, with status 0, after one SIGTERM.
        os.kill(bridge.process.pid, signal.SIGTERM)
        assert bridge.process.wait(bridge.launch.stop_s) == 0, bridge.log
        assert bridge.launch.stop_s >= BridgeSettings.__dataclass_fields__["grace_s"].default + 25


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize(
    ("name", "settings", "spare_s"),
    [
        ("worker", WorkerSettings, 21),
        ("gateway", GatewaySettings, 15),
        ("board", BoardSettings, 15),
    ],
)
def test_a_program_is_killed_only_after_its_grace_period(
    origin: str, name: str, settings: Any, spare_s: float
) -> None:
    (launch,) = (one for one in ORIGINS[origin]() if one.name == name)
    default_s = settings.__dataclass_fields__["grace_s"].default
    grace_s = float(launch.env.get(f"TOKENYARD_{name.upper()}_GRACE_S", default_s))
    assert launch.stop_s >= grace_s + spare_s


# A systemd unit is one process; the second coordinator runs on another host.
@pytest.mark.parametrize("site", ["compose", "kubernetes"], indirect=True)
def test_a_standby_leads_after_the_leader_is_killed(site: Site) -> None:
    # Given the files' coordinators
    assert site.launches["coordinator"].copies == 2
    site.start("coordinator")

    def leader(connection: redis.Redis) -> Any:
        return connection.get("tokenyard:{main}:leader")

    with redis.Redis.from_url(site.server.url_of("admin")) as connection:
        first = eventually(lambda: leader(connection), timeout_s=START_S)
        # If the leader is killed, I expect the other one to lead.
        [leading] = eventually(lambda: [one for one in site.started if "leads as" in one.log])
        leading.process.kill()
        eventually(lambda: leader(connection) not in {None, first}, timeout_s=START_S)
