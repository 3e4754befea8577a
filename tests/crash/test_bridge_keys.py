"""The key check of a bridge, asked as nginx does, and by nginx itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.bridge.requests import Caller, read_id
from tests.support.api_keys import create_key
from tests.support.builders import make_request
from tests.support.front_end import FrontEnd
from tests.support.processes import Plant, Program
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.process.embedded_broker import free_port
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.tenants import TenantSettings, encode_tenant

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Told:
    """An answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def caller(self) -> Caller:
        """Who asks."""
        return read_id(self.headers["x-request-id"])[0]


def get(url: str, data: bytes | None = None, **headers: str) -> Told:
    """Ask by HTTP."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, given)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Told(
                answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
            )
    except urllib.error.HTTPError as error:
        with error:
            told = {k.lower(): v for k, v in error.headers.items()}
            return Told(error.code, told, error.read())


class Rig:
    """A yard whose bridge checks keys."""

    def __init__(self, plant: Plant, front: FrontEnd, folder: Path) -> None:
        self.plant = plant
        self.port = free_port()
        self.yard = Yard(plant.connection, plant.keys)
        options = {"handshake": front.address, "journal_dir": folder, "key_check_port": self.port}
        self.bridge: Program = plant._start("gateway.bridge", options)
        front.meet()

    def key(self, tenant: str, **more: object) -> str:
        """A new key, as a header has it."""
        return f"Bearer {create_key(self.yard, tenant, **more)[0]}"

    def check(self, **headers: str) -> Told:
        """What a proxy is told."""
        return get(f"http://127.0.0.1:{self.port}/check", **headers)

    def refused(self, **headers: str) -> Told:
        """What its client is told after a refusal."""
        return get(f"http://127.0.0.1:{self.port}/refused", **headers)


@pytest.fixture
def rig(broker: Server, tmp_path: Path) -> Iterator[Rig]:
    with Plant(broker.url) as plant, FrontEnd() as front:
        plant.up()
        yield Rig(plant, front, tmp_path)


def test_a_key_says_who_asks(rig: Rig) -> None:
    told = rig.check(Authorization=rig.key("acme", classes=["low"], stream_interval_ms=100))
    assert told.status == 204
    assert told.caller[:3] == ("acme", "low", 100)
    own = {"X_Request_Timeout_Ms": "5000", "X_Tokenyard_Stream_Interval_Ms": "0"}
    caller = rig.check(Authorization=rig.key("acme"), **own).caller
    assert caller[:3] == ("acme", "normal", 0)
    assert caller.deadline_ms is not None


def test_an_idempotency_key_names_the_answer_of_its_tenant(rig: Rig) -> None:
    keys = [rig.key("acme"), rig.key("acme"), rig.key("other")]
    names = [
        read_id(rig.check(Authorization=key, Idempotency_Key="k").headers["x-request-id"])[1]
        for key in keys
    ]
    assert names[0] == names[1] != names[2]
    assert all(name.startswith("idem-") for name in names)
    drawn = {rig.check(Authorization=keys[0]).headers["x-request-id"] for _ in range(3)}
    assert len(drawn) == 3
    assert not any("idem-" in name for name in drawn)


def test_a_refusal_is_401_for_the_proxy_and_itself_for_the_client(rig: Rig) -> None:
    rig.plant.connection.hset(
        rig.plant.keys.tenants, "full", encode_tenant(TenantSettings(max_waiting_requests=1))
    )
    rig.plant.connection.hset(rig.plant.keys.tenant("full"), "waiting", 1)
    cases = {
        401: {},
        403: {"Authorization": rig.key("acme", models=["another"])},
        400: {"Authorization": rig.key("acme"), "Idempotency_Key": "k" * 300},
        429: {"Authorization": rig.key("full")},
    }
    for status, headers in cases.items():
        assert rig.check(**headers).status == 401
        told = rig.refused(**headers)
        assert told.status == status
        assert json.loads(told.body)["error"]["message"]
        assert ("retry-after" in told.headers) == (status == 429)


def test_a_full_queue_is_told_before_the_front_end_sees_the_request(rig: Rig) -> None:
    key = rig.key("acme")
    rig.plant.connection.hset(rig.plant.keys.info, "max_num_queued_reqs", 3)
    for worker in rig.plant.programs[:2]:
        worker.suspend()
    rig.plant.push_all([make_request() for _ in range(5)])
    eventually(lambda: rig.refused(Authorization=key).status == 429)


def test_nginx_lets_pass_what_the_check_lets_pass(rig: Rig, tmp_path: Path) -> None:
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    port, front_port = free_port(), free_port()
    given = (ROOT / "deploy" / "bridge.nginx.conf").read_text()
    for old, new in ((8000, port), (8001, front_port), (8002, rig.port)):
        given = given.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
    folders = " ".join(
        f"{name}_temp_path {tmp_path};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    echo = (
        "default_type text/plain; location / { return 200 $http_x_request_id,$http_authorization; }"
    )
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/log; events {{}}"
        f" http {{ access_log off; {folders} {given}"
        f" server {{ listen 127.0.0.1:{front_port}; {echo} }} }}"
    )
    process = subprocess.Popen([nginx, "-p", tmp_path, "-c", tmp_path / "nginx.conf"])
    try:
        url, key = f"http://127.0.0.1:{port}", rig.key("acme")

        def is_up() -> bool:
            try:
                return get(f"{url}/health").status == 200
            except urllib.error.URLError:
                return False

        eventually(is_up)
        body = json.dumps({"request_id": "~evil~high~~~x"}).encode()
        asked = f"{url}/v1/completions"
        passed = get(asked, body, Authorization=key, X_Request_Id="~evil~high~~~x")
        assert passed.status == 200
        assert passed.body.startswith(b"~acme~normal~~~")
        assert passed.body.endswith(b","), "the key stays with the proxy"
        assert get(asked, body).status == 401
        for path in ("/v2/embed", "/classify", "/pooling", "/score", "/rerank"):
            assert get(f"{url}{path}", body).status == 401
            assert get(f"{url}{path}", body, Authorization=key).status == 200
        assert get(asked, body, Authorization=rig.key("a", models=["b"])).status == 403
        assert get(asked, b"x" * 5_000_000, Authorization=key).status == 413
        for path in ("/metrics", "/classify/x", "/v3/score"):
            assert get(f"{url}{path}", Authorization=key).status == 404
        assert get(f"{url}/check", Authorization=key).status == 404
    finally:
        process.terminate()
        process.wait(30)
