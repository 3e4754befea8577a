"""A day of work in a yard whose processes, clients and operator log in as their own users."""

from __future__ import annotations

import json
import signal
import urllib.request
from typing import Any, Final

import pytest
import redis
from click.testing import CliRunner

from tests.board.asking import opened
from tests.deploy.rights import denied
from tests.support.brokers import GuardedServer
from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.servers import free_port
from tests.support.streams import dead_letters
from tests.support.waiting import eventually
from tokenyard import Client, QuotaExceeded
from tokenyard.board.pages import PAGES
from tokenyard.cli import main
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order, Signal, Trial, model_scope
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.wire import Request, SamplingParams, request_fields
from tokenyard.scripts import Scripts
from tokenyard.yard.tenants import list_tenants, search_tenants
from worker.engines.crash_points import FAULTY, POISON

LONG = SamplingParams(max_tokens=2000)
MODELS = '[models.small]\npath = "org/small"\n[models.large]\npath = "org/large"\n'


class Day:
    """A yard whose processes, clients and operator each log in as their own user."""

    def __init__(self, server: GuardedServer, user: str = "admin", yard: str = "") -> None:
        """The test itself connects as ``user``."""
        self.server = server
        self.plant = Plant(server.url_of(user), yard)
        self.keys = self.plant.keys
        self.metrics_port = free_port()

    def url(self, user: str) -> str:
        """A user's URL, with a client name, so that `MONITOR` shows which user sends a command."""
        return f"{self.server.url_of(user)}?client_name={user}"

    def connect(self, user: str) -> redis.Redis:
        return redis.Redis.from_url(self.url(user), socket_timeout=30.0)

    def coordinator(self, **options: object) -> None:
        options = {"metrics_port": self.metrics_port, **options}
        self.plant.coordinator(redis_url=self.url("coordinator"), **options)
        self.plant.wait_for_leader()

    def worker(self, name: str, **options: object) -> None:
        options = {
            "redis_url": self.url("worker"),
            "simulated_step_s": 0.01,
            "grace_s": 0.1,
            **options,
        }
        self.plant.worker(name=name, **options)

    def client(self, name: str | None = "client") -> Client:
        return Client(self.url("client"), self.keys.yard, client_id=name)

    def push(self, request: Request, entry: str = "*") -> None:
        """Submit by a plain XADD, as the user `client`."""
        with self.connect("client") as connection:
            fields: dict[Any, Any] = dict(request_fields(request))
            connection.xadd(self.keys.intake("normal"), fields, id=entry)

    def command(self, *arguments: str) -> str:
        """Run one of the operator's commands, which must succeed; its output."""
        options = ["--redis-url", self.url("admin"), "--yard", self.keys.yard]
        done = CliRunner().invoke(main, [*options, *arguments])
        assert done.exit_code == 0, done.output
        return done.output


def request(**fields: Any) -> Request:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 5))
    return make_request(client="client", params=params, model="sim", **fields)


#: Its media lie beside the request.
CHAT_WITH_A_PICTURE: Final = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
    }
]


def client_asks(day: Day) -> None:
    """Do all that a client can do, except cancel."""
    with day.client() as client:
        client.submit([1, 2], max_tokens=5).result()
        handle = client.submit([1, 2], model="sim", max_tokens=5, stream=True, id="kept")
        assert list(handle)
        assert client.status("kept").is_over
        client.submit([1], model="sim", max_tokens=5, cancel_on_disconnect=True).result()
        assert list(client.submit([1, 2], model="sim", max_tokens=5, stream=True, n=2))
        assert len(list(client.map([[1], [2]], model="sim", max_tokens=5))) == 2
        client.submit(CHAT_WITH_A_PICTURE, model="sim", max_tokens=5).result()
    with day.client() as client:
        assert client.attach("kept").result().ok
    for name in ("client-1", None):
        with day.client(name) as client:
            client.submit([1, 2], model="sim", max_tokens=5).result()


def tenants_ask(day: Day) -> None:
    """A tenant with limits submits by script and by hand, and reaches one of them."""
    limits = {"waiting-requests": 5, "running-requests": 2, "tokens": 50}
    options = [text for name, most in limits.items() for text in (f"--max-{name}", str(most))]
    day.command("tenants", "set", "acme", *options, "--tokens-per-minute", "100000")
    with day.client() as client:
        handles = client.submit_many([[1], [2], [3]], tenant="acme", max_tokens=3)
        assert all(handle.result(30).ok for handle in handles)
        with pytest.raises(QuotaExceeded):
            client.submit([1], tenant="acme", max_tokens=51)
    with day.connect("client") as connection:
        for most in (3, 51):
            fields: Any = {"id": f"hand-{most}", "client": "client", "prompt": "x"}
            fields |= {"tenant": "acme", "params": json.dumps({"max_tokens": most})}
            connection.xadd(day.keys.intake("normal"), fields)
    ledgers = [day.keys.ledger("client", f"hand-{most}") for most in (3, 51)]

    def states() -> list[Any]:
        return [day.plant.connection.hget(ledger, "state") for ledger in ledgers]

    eventually(lambda: states() == [b"completed", b"failed"])


def client_asks_by_hand(day: Day) -> None:
    """Submit and read as a client with only XADD and XREAD."""
    plain = request()
    day.push(plain)
    with day.connect("client") as connection:
        stream = day.keys.reply("client", plain.id)
        answer: Any = connection.xread({stream: "0"}, block=10_000)
    assert answer


def client_cancels(day: Day) -> None:
    """Cancel twice: the server refuses the first attempt, then the client asks the coordinator."""
    assert denied(day.server) == []
    with day.client() as client:
        for _ in range(2):
            client.submit([1], model="sim", max_tokens=2000).cancel()
    [refused] = denied(day.server)
    assert refused.startswith("client: toplevel key")


def client_vanishes(day: Day) -> None:
    """Let a watched request end with its client."""
    left = request(max_tokens=2000)
    with day.connect("client") as connection:
        scripts = Scripts(Yard(connection, day.keys))
        scripts.submit("normal", [left], watched="client")
        connection.zadd(day.keys.clients, {"client": 1})
    assert day.plant.result(left.id, "client").status == "cancelled"


def requests_are_bad(day: Day) -> None:
    """Submit an invalid, a late and an anonymous entry."""
    late, wrong, endless = request(deadline_ms=1), request(), request()
    day.push(late)
    day.push(endless)
    with day.connect("client") as connection:
        fields: dict[Any, Any] = {**request_fields(wrong), "params": "?"}
        connection.xadd(day.keys.intake("normal"), fields)
        connection.xadd(day.keys.intake("high"), {"nobody": "1"})
    assert day.plant.result(late.id, "client").status == "expired"
    assert day.plant.result(wrong.id, "client").status == "failed"
    assert day.plant.result(endless.id, "client").ok
    eventually(lambda: dead_letters(day.plant))


def entry_is_from_the_future(day: Day) -> None:
    """Submit under the highest entry id: the leader creates the intake again."""
    last = request()
    day.push(last, "18446744073709551615-18446744073709551615")
    assert day.plant.result(last.id, "client").ok
    client_asks_by_hand(day)


def workers_fail(day: Day) -> None:
    """Let one worker be killed, one crash on a request, and one fail a request."""
    poison, faulty = request(tokens=[*POISON, 1]), request(tokens=[*FAULTY, 1])
    running = [request(max_tokens=100, stream=True) for _ in range(6)]
    for one in running:
        day.push(one)
    eventually(lambda: all(day.plant.published(one.id, "client") for one in running))
    (victim, *_) = day.plant.programs[1].children()
    victim.kill()
    day.push(poison)
    assert day.plant.result(poison.id, "client").error.code == "POISONED"
    assert all(day.plant.result(one.id, "client").ok for one in running)
    day.plant.programs[1].stop()
    day.worker("frail", crash_point="fault:1", model_name="sim")
    day.push(faulty)
    assert day.plant.result(faulty.id, "client").ok


def models_are_placed(day: Day) -> None:
    """Let a host load requested models."""
    models = day.plant.write("models.toml", MODELS)
    # Slow enough that a running request still runs when it is cancelled.
    day.plant.host(models, redis_url=day.url("worker"), simulated_step_s=0.01)
    eventually(lambda: b"small" in day.plant.connection.hget(day.keys.info, "models"))
    for name in ("small", "large"):
        wanted = make_request(client="client", model=name)
        day.push(wanted)
        assert day.plant.result(wanted.id, "client").ok


#: Commands that only the server's keeper may give; the doctor says what it could not read.
FOR_THE_KEEPER = {"config|get", "acl|getuser", "acl|log", "memory|usage"}


def operator_acts(day: Day) -> None:
    """Run the commands of an operator."""
    day.command("info")
    day.command("info", "--json")
    day.command("explain", "kept", "--client", "client")
    day.command("result", "kept", "--client", "client")
    day.command("explain", "kept")
    assert "completed" in day.command("requests")
    day.command("dead", "list")
    (poison,) = (one for one in dead_letters(day.plant) if one.get("client") == "client")
    day.command("dead", "show", poison["id"])
    day.command("dead", "requeue", poison["id"])
    day.command("dead", "drop", "--all")
    key = json.loads(day.command("keys", "create", "--tenant", "research", "--json"))
    assert key["id"] in day.command("keys", "list")
    day.command("keys", "revoke", key["id"])
    day.command("tenants", "set", "research", "--weight", "2")
    day.command("tenants", "show", "research")
    day.command("tenants", "usage")
    day.command("tenants", "remove", "research")
    with day.connect("admin") as connection:  # as the board does
        list_tenants(Yard(connection, day.keys), 0, 50)
        search_tenants(Yard(connection, day.keys), "search")
    running = make_request(
        client="client", model="large", stream=True, params=LONG, tenant="research"
    )
    day.push(running)
    eventually(lambda: day.plant.published(running.id, "client"))
    waiting = make_request(client="client", model="small")
    day.push(waiting)
    day.command("cancel", waiting.id, "--client", "client")
    assert running.id in day.command("requests", "--state", "assigned")
    day.command("cancel", running.id)
    # Its worker says what it had generated.
    assert "used" in day.plant.ledger(running.id, "client")
    eventually(lambda: "charge" not in day.plant.ledger(running.id, "client"))


def board_is_used(day: Day) -> None:
    """Log in at a board, look at each page, do something, and log out.

    Its first page shows what the doctor finds, who may not read everything either.
    """
    assert denied(day.server) == []
    key = json.loads(day.command("keys", "create", "--role", "admin", "--json"))["key"]
    with opened(day.url("admin"), day.keys.yard, needs_keys=True) as ask:
        cookie = ask("/board/login", "POST", form={"key": key}).cookie
        for page in PAGES:
            if "{" not in page.path and "batch" not in page.path:  # these need RQ's keys, too
                answer = ask(f"/board{page.path}", cookie=cookie)
                assert answer.status in {200, 400, 404}, page.path  # some ask for a name
        form = {"name": "made at the board", "tenant": "research"}
        assert ask("/board/do/key.create", "POST", form=form, cookie=cookie).status == 200
        assert "key.create" in ask("/board/audit", cookie=cookie).body
        assert ask("/board/logout", "POST", cookie=cookie).status == 303
    refused = {line.rpartition(" ")[2] for line in denied(day.server)}
    assert refused <= FOR_THE_KEEPER, refused


def operator_looks_for_faults(day: Day) -> None:
    """Run the doctor: it sees the broker, except for what only the server's keeper may read."""
    assert denied(day.server) == []
    lines = day.command("doctor", "--all", "--json").splitlines()
    found = {one["name"]: one for one in map(json.loads, lines)}
    for check in ("version", "eviction", "memory", "replication", "connections", "entries"):
        assert found[check]["verdict"] != "unknown", found[check]
    # The server logs the refused commands.
    refused = {line.rpartition(" ")[2] for line in denied(day.server)}
    assert refused == FOR_THE_KEEPER, refused


def metrics_are_read(day: Day) -> None:
    """Read the coordinator's metrics, as Prometheus does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{day.metrics_port}/metrics", timeout=30) as page:
        assert b"tokenyard_" in page.read()


def operator_signals(day: Day) -> None:
    """Give desired states, wait until they are obeyed, and take them back."""
    ways: tuple[Signal, ...] = ("SET_GENERATION_EPOCH", "PAUSE", "SUSPEND", "RESUME", "UNPAUSE")
    with day.connect("admin") as connection:
        signals = Signals(Yard(connection, day.keys))
        for signal in ways:
            assert signals.wait(signals.give(Order(signal=signal, epoch=1)), 30.0) == []
        # One pause belongs to a reload whose caller has died: the leader ends it.
        scope = model_scope("small")
        signals.give(Order(signal="PAUSE", scope=scope, trial=Trial(until_ms=1)))
        eventually(lambda: scope not in signals.desired_states().by_scope)
    streamed = make_request(client="client", model="large", stream=True)
    day.push(streamed)
    assert day.plant.result(streamed.id, "client").provenance.epoch == 1


def everybody_goes(day: Day) -> None:
    """Stop all coordinators and controllers gracefully."""
    running = request(max_tokens=3000, stream=True)
    day.push(running)
    eventually(lambda: day.plant.published(running.id, "client"))
    going = [program for program in day.plant.programs if program.is_running]
    for program in going:
        program.signal(signal.SIGTERM)
    assert [program.wait() for program in going] == [0] * len(going)
