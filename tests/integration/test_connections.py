"""Ways to reach a broker: TLS, a Unix socket, Sentinels, a Redis Cluster, each for real."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from redis.exceptions import TryAgainError

from coordinator.recovery.failover import FailoverDetector
from tests.support.brokers import Certificates, Cluster, Sentinel, ServerWith, ask, bus_port
from tests.support.builders import make_request, make_result, random_name, worker_json
from tests.support.processes import Plant
from tests.support.servers import Server, ServerName, free_port
from tests.support.streams import check_handles
from tests.support.waiting import eventually
from tests.support.watched import USERS, Keep, Watched, settle
from tests.support.yard import LONG_MS, PlayedYard
from tokenyard import AsyncClient, BrokerUnavailable, Client, Handle
from tokenyard.broker import discovery, tls
from tokenyard.broker.connection import open_async_connection, open_connection, translated
from tokenyard.broker.discovery import Address, ClusterNodes
from tokenyard.doctor.broker_checks import check_server
from tokenyard.doctor.evidence import gather
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.scripts import Scripts
from tokenyard.scripts.answers import Publication, Published
from tokenyard.scripts.calls import Call, command_of, load_scripts, script_names

AWAY_S = 60.0


def serve(plant: Plant, url: str, **urls: str) -> None:
    """A coordinator and a worker, each reached by its URL or by the common one."""
    plant.connection = open_connection(urls.get("admin", url), timeout_s=30.0)
    plant.coordinator(redis_url=urls.get("coordinator", url))
    plant.worker(redis_url=urls.get("worker", url), simulated_step_s=0.02)
    plant.wait_for_leader()
    plant.wait_for_workers(1)


async def ask_async(url: str, yard: str) -> None:
    async with AsyncClient(url, yard, client_id="client-2") as client:
        handle = await client.submit([1, 2], max_tokens=5, stream=True)
        tokens = [token async for delta in handle for token in delta.tokens]
        assert len(tokens) == 5


def ask_both_ways(url: str, yard: str) -> None:
    """Both clients, each with a request whose tokens stream."""
    with Client(url, yard, client_id="client-1") as client:
        handle = client.submit([1, 2], max_tokens=5, stream=True)
        assert [token for delta in handle for token in delta.tokens] == handle.result().tokens
    asyncio.run(ask_async(url, yard))


def test_unix_socket(keep: Keep, tmp_path: Path) -> None:
    # Given a server that is reached by a socket in the file system only
    path = tmp_path / "redis.sock"
    server = ServerWith("valkey", tmp_path, "--unixsocket", path)
    keep(server)
    with Plant(server.url) as plant:
        # If a yard uses that,
        serve(plant, f"unix://{path}")

        # I expect that it serves.
        ask_both_ways(f"unix://{path}", plant.keys.yard)


@pytest.mark.long
def test_tls(keep: Keep, tmp_path: Path) -> None:
    # Given a server that speaks TLS, and wants to see a certificate as well
    papers = Certificates(tmp_path)
    port = free_port()
    options = ["--tls-port", port, "--tls-ca-cert-file", papers.authority]
    options += ["--tls-cert-file", papers.certificate, "--tls-key-file", papers.key]
    keep(ServerWith("redis", tmp_path, *options))
    address = f"rediss://127.0.0.1:{port}"
    shown = f"ssl_certfile={papers.certificate}&ssl_keyfile={papers.key}"
    url = f"{address}?ssl_ca_certs={papers.authority}&{shown}"
    with Plant(url) as plant:
        # If a yard uses that,
        serve(plant, url)

        # I expect that it serves,
        ask_both_ways(url, plant.keys.yard)
        # that a server which nobody vouches for is not trusted,
        for bad in (f"{address}?{shown}", f"redis://127.0.0.1:{port}"):
            with pytest.raises(BrokerUnavailable), Client(bad, plant.keys.yard):
                pass
        # and that nobody is let in without a certificate of his own.
        with (
            pytest.raises(BrokerUnavailable),
            Client(f"{address}?ssl_ca_certs={papers.authority}", plant.keys.yard),
        ):
            pass


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
@pytest.mark.parametrize("is_async", [False, True])
def test_tls_where_nobody_answers_the_handshake(
    monkeypatch: pytest.MonkeyPatch, scheme: str, *, is_async: bool
) -> None:
    # Where the handshake has a part of the time for connecting, that is long enough for the rest.
    monkeypatch.setattr(tls, "_SHARE", 0.01)
    bound_s = 60.0 if is_async and scheme == "rediss" else 0.5
    # Given a server that takes connections and, like a Redis without TLS, waits for more
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"

        async def ask() -> None:
            await open_async_connection(url, connect_timeout_s=bound_s).ping()

        def connect() -> None:
            if is_async:
                asyncio.run(ask())
            else:
                open_connection(url, connect_timeout_s=bound_s).ping()

        # If it is asked for TLS, I expect advice,
        told = r"TLS handshake in [\d.]+ s.* use redis://$"
        with pytest.raises(BrokerUnavailable, match=told), translated(url):
            connect()

        # and that it is asked once.
        if scheme == "rediss":
            server.setblocking(False)
            server.accept()[0].close()
            with pytest.raises(BlockingIOError):
                server.accept()


# Losing the master

PROMPTS = [[number + 1, number + 2] for number in range(30)]


def start_streams(client: Client) -> list[Handle]:
    """Streams, the first of which have begun."""
    handles = client.submit_many(PROMPTS, max_tokens=100, stream=True)
    eventually(lambda: all(one.status().tokens_published >= 3 for one in handles[:5]))
    return handles


# Sentinel


@pytest.mark.long
@pytest.mark.parametrize("name", ["valkey", "redis"])
def test_sentinel_failover(name: ServerName, keep: Keep, tmp_path: Path) -> None:
    # Given a yard behind a Sentinel, and streams that run or wait
    watched = Watched(name, tmp_path, keep)
    urls = {user: watched.url(user) for user in USERS}
    with Plant(watched.master.url) as plant:
        serve(plant, urls["client"], **urls)
        with Client(urls["client"], plant.keys.yard, client_id="client") as client:
            handles = start_streams(client)

            # If the master dies after the replica has got all that was acknowledged,
            settle(watched.master.url_of("default"))
            # and is replaced by it,
            watched.fail_over()

            # I expect that everything accepted is answered, each token once,
            check_handles(handles, PROMPTS, 100)
            # and that new requests are served, by both clients,
            ask_both_ways(urls["client"], plant.keys.yard)
            # without anybody having been started again.
            assert all(program.is_running for program in plant.programs)


# Redis Cluster


def yard_on(cluster: Cluster, master: ServerWith) -> str:
    """The name of a yard whose hash slot a node holds."""
    names = (random_name("yard") for _ in range(1000))
    return next(one for one in names if cluster.holder_of(slot_of(one)) is master)


def slot_of(yard: str) -> int:
    return key_slot(Keys(yard).info.encode())


@pytest.mark.long
def test_yards_on_the_nodes_of_a_cluster(keep: Keep, tmp_path: Path) -> None:
    # Given a cluster of three nodes, and yards on two of them
    cluster = Cluster("valkey", tmp_path, replicas=False)
    keep(cluster)
    nodes = cluster.masters[1:]
    yards = [yard_on(cluster, node) for node in nodes]
    with ExitStack() as stack:
        plants = [stack.enter_context(Plant(cluster.nodes[0].url)) for _ in yards]
        for plant, yard in zip(plants, yards, strict=True):
            plant.keys = Keys(yard)
            # If all are given the same URL,
            serve(plant, cluster.url)

            # I expect that nobody has to try again,
            assert not any("WARNING" in program.log for program in plant.programs)
        # that each yard serves,
        for yard in yards:
            ask_both_ways(cluster.url, yard)
        # one program may use several of them,
        clients = [stack.enter_context(Client(cluster.url, yard)) for yard in yards]
        handles = [clients[number % 2].submit(prompt) for number, prompt in enumerate(PROMPTS)]
        assert all(handle.result(AWAY_S).ok for handle in handles)
        # and that each lies on its node.
        for node, yard in zip(nodes, yards, strict=True):
            assert ask(node, "EXISTS", Keys(yard).info) == 1
            assert ask(node, "CLUSTER", "COUNTKEYSINSLOT", slot_of(yard)) > 0


@pytest.mark.long
def test_cluster_failover(keep: Keep, tmp_path: Path) -> None:
    # Given a yard in a cluster with replicas, and streams that run or wait
    cluster = Cluster("redis", tmp_path, replicas=True)
    keep(cluster)
    with Plant(cluster.nodes[0].url) as plant:
        serve(plant, cluster.url)
        holder = cluster.holder_of(slot_of(plant.keys.yard))
        with Client(cluster.url, plant.keys.yard) as client:
            handles = start_streams(client)

            # If its node dies after the replica has got all that was acknowledged,
            settle(holder.url)
            cluster.fail_over(holder)

            # I expect that everything accepted is answered, each token once,
            check_handles(handles, PROMPTS, 100)
            # that new requests are served, by both clients,
            ask_both_ways(cluster.url, plant.keys.yard)
            # and that nobody was started again.
            assert all(program.is_running for program in plant.programs)


def open_slot(yard: str, source: ServerWith, target: ServerWith) -> None:
    """Begin to move the slot of a yard; its keys stay."""
    for node, other, state in ((target, source, "IMPORTING"), (source, target, "MIGRATING")):
        ask(node, "CLUSTER", "SETSLOT", slot_of(yard), state, ask(other, "CLUSTER", "MYID"))


def move_keys(source: ServerWith, target: ServerWith, *keys: object) -> None:
    ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 60_000, "KEYS", *keys)


def close_slot(yard: str, source: ServerWith, target: ServerWith) -> None:
    """Move the rest of a slot, which then is the target's."""
    slot = slot_of(yard)
    while left := ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 100):
        move_keys(source, target, *left)
    for node in (target, source):
        ask(node, "CLUSTER", "SETSLOT", slot, "NODE", ask(target, "CLUSTER", "MYID"))


@pytest.mark.long
def test_an_open_slot_stops_no_script_half_way(keep: Keep, tmp_path: Path) -> None:
    # Given a worker that has a request of a tenant, alone on its lane
    cluster = Cluster("valkey", tmp_path, replicas=False)
    keep(cluster)
    source, target, _ = cluster.masters
    keys = Keys(yard_on(cluster, source))
    with redis.Redis(port=source.port) as here, redis.Redis(port=target.port) as there:
        yard = PlayedYard(here, keys, Scripts(Yard(here, keys)))
        worker = yard.worker()
        request = make_request(tenant="acme")
        held = yard.assign(worker, request, alone=True)
        load_scripts(here)
        load_scripts(there)

        # If its slot is open, and the tenant's key has moved,
        open_slot(keys.yard, source, target)
        move_keys(source, target, keys.tenant("acme"))
        before = yard.ledger(request)
        publication = Publication(held, make_result(request.id, [1]))
        with pytest.raises(TryAgainError):
            yard.scripts.finish(worker, [publication])

        # I expect that nothing has changed,
        assert yard.ledger(request) == before
        assert len(yard.lane(worker)) == 1
        assert yard.alone(worker) == held.entry
        # that no script begins at either node, whatever it is about,
        for name in script_names():
            command = command_of(Call(name, [keys.quarantine], [], bool))
            with pytest.raises(TryAgainError):
                here.execute_command(*command)
            asking = there.pipeline(transaction=False).execute_command("ASKING")
            _, refused = asking.execute_command(*command).execute(raise_on_error=False)
            assert isinstance(refused, TryAgainError), name

        # and that it ends where the slot has gone, with all that hangs on it.
        close_slot(keys.yard, source, target)
        scripts = Scripts(Yard(there, keys))
        assert scripts.finish(worker, [publication]) == [Published.PUBLISHED]
        assert not there.xlen(keys.lane(worker))
        assert not there.exists(keys.quarantine)
        assert there.hget(keys.tenant("acme"), "running") == b"0"
        assert there.exists(keys.usage("acme"))


@pytest.mark.long
def test_a_slot_that_moves_fences_nobody_and_a_promotion_everybody(
    keep: Keep, tmp_path: Path
) -> None:
    # Given a yard at one node of a cluster, and another node that has replaced its master
    cluster = Cluster("valkey", tmp_path, replicas=True)
    keep(cluster)
    source = cluster.masters[0]
    old, promoted = cluster.masters[1], cluster.replicas[1]
    keys = Keys(yard_on(cluster, source))
    ask(promoted, "CLUSTER", "FAILOVER")
    eventually(lambda: all(is_master(node, promoted) for node in cluster.nodes))
    with open_connection(cluster.url) as connection:
        yard = PlayedYard(connection, keys, Scripts(Yard(connection, keys)))
        detector = FailoverDetector(yard.scripts)
        worker = yard.worker()
        assert not detector.check(yard.token)

        # If the slot moves there,
        open_slot(keys.yard, source, promoted)
        close_slot(keys.yard, source, promoted)
        # I expect the leader to notice, and no worker to be fenced;
        assert detector.check(yard.token)
        assert yard.scripts.renew(LONG_MS, [(worker, worker_json())]) == [True]
        # `doctor` and a check of the server to look at that node, whichever the URL names first,
        keyless = gather(
            Yard(open_connection(f"redis+cluster://127.0.0.1:{old.port}"), keys, "redis://x")
        )
        seen = {one.name: one.found for one in check_server(keyless)}
        assert seen["replication"] == "master, 1 replicas"
        # and that a replica of the node that has the yard now fences all.
        assert not detector.check(yard.token)
        ask(old, "CLUSTER", "FAILOVER")
        eventually(lambda: is_master(promoted, old))
        assert detector.check(yard.token)
        assert yard.scripts.renew(LONG_MS, [(worker, worker_json())]) == [False]


def is_master(asked: ServerWith, node: ServerWith) -> bool:
    """Whether a node of a cluster takes another one for a master that has slots."""
    lines = ask(asked, "CLUSTER", "NODES").decode().splitlines()
    [line] = [one.split() for one in lines if f":{node.port}@" in one]
    return "master" in line[2] and len(line) > 8


# Both over TLS


def tls_options(papers: Certificates, port: int) -> list[str]:
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-ca-cert-file", str(papers.authority)]
    return [*options, "--tls-cert-file", str(papers.certificate), "--tls-key-file", str(papers.key)]


@pytest.mark.long
def test_cluster_over_tls(keep: Keep, tmp_path: Path) -> None:
    # Given two nodes that speak TLS, to each other as well
    papers, ports, nodes = Certificates(tmp_path), [free_port(), free_port()], []
    for port in ports:
        folder = tmp_path / str(port)
        folder.mkdir()
        options = [*tls_options(papers, port), "--cluster-enabled", "yes", "--tls-cluster", "yes"]
        nodes.append(ServerWith("redis", folder, *options, "--cluster-port", free_port()))
        keep(nodes[-1])
    ask(nodes[1], "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    ask(nodes[0], "CLUSTER", "MEET", "127.0.0.1", ports[1], bus_port(nodes[1]))
    eventually(lambda: b"cluster_state:ok" in ask(nodes[0], "CLUSTER", "INFO"))
    with Plant(nodes[0].url) as plant:
        # If a yard is looked for at the one that does not hold it,
        url = f"rediss+cluster://127.0.0.1:{ports[0]}?ssl_ca_certs={papers.authority}"
        serve(plant, url)

        # I expect that it is found at the other.
        ask_both_ways(url, plant.keys.yard)
        assert ask(nodes[1], "EXISTS", plant.keys.info) == 1


@pytest.mark.long
def test_sentinel_over_tls(keep: Keep, tmp_path: Path) -> None:
    # Given a master and a Sentinel that speak TLS, to each other as well
    papers, ports = Certificates(tmp_path), [free_port(), free_port()]
    options = tls_options(papers, ports[0])
    master = ServerWith("redis", tmp_path, *options, "--tls-replication", "yes")
    keep(master)
    options[1] = str(ports[1])
    sentinel = Sentinel("redis", tmp_path, master)
    sentinel._command += [*options, "--tls-replication", "yes"]
    config = tmp_path / "sentinel.conf"
    text = config.read_text().replace(f"127.0.0.1 {master.port}", f"127.0.0.1 {ports[0]}")
    config.write_text("".join(line for line in text.splitlines(True) if " auth-" not in line))
    keep(sentinel)
    with Plant(master.url) as plant:
        # If a yard asks the Sentinel over TLS, I expect that it serves over TLS.
        url = f"rediss+sentinel://127.0.0.1:{ports[1]}/yards?ssl_ca_certs={papers.authority}"
        serve(plant, url)
        ask_both_ways(url, plant.keys.yard)


@pytest.mark.parametrize("url", ["redis+cluster://127.0.0.1:{}", "redis+sentinel://127.0.0.1:{}/a"])
def test_nobody_there(url: str) -> None:
    # If nobody answers where the server is, I expect to be told so.
    with pytest.raises(BrokerUnavailable, match=r"no (node of the cluster|Sentinel)"):
        Client(url.format(free_port()), "yard", connect_timeout_s=60.0).start()


def test_a_node_that_hangs_is_passed_by(
    valkey_broker: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a node that takes connections and never answers, and one that has all the time for it
    good = ("127.0.0.1", valkey_broker.port)
    ask_briefly = discovery._briefly

    def briefly(address: Address, options: Mapping[str, Any]) -> redis.Redis:
        patience_s = 60.0 if address == good else 0.1
        return ask_briefly(address, {**options, "socket_timeout": patience_s})

    monkeypatch.setattr(discovery, "_briefly", briefly)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        nodes = ClusterNodes([("127.0.0.1", hanging.getsockname()[1]), good], {})

        # I expect the other one to be found.
        assert nodes.find() == good
