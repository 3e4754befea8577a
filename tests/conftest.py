"""Fixtures for all tests: real servers, a yard of one's own, and a check for leftovers.

Servers are started once for each test process (each pytest-xdist worker has its own), when the
first test asks for one. Tests do not see each other, since each has a yard with a random name.

Valkey runs every test; `make test-long` runs them on Redis too.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from hypothesis import HealthCheck, settings

from tests.support.brokers import required
from tests.support.builders import random_name
from tests.support.counting import Counting
from tests.support.effort import DEFAULT_EXAMPLES
from tests.support.fake_clock import FakeClock, begin_test, faked
from tests.support.leftovers import end_leftovers, mark_descendants
from tests.support.processes import Plant
from tests.support.servers import Server, ServerName, find_binary
from tests.support.zygote import stop_zygote
from tokenyard.protocol.keys import Keys, Yard
from tokenyard.scripts import Scripts

if TYPE_CHECKING:
    from tests.gateway.stand import Stand

# On a busy machine the time that servers take to answer, and examples to be made, varies too much
# for a deadline of either.
settings.register_profile(
    "tokenyard",
    deadline=None,
    max_examples=DEFAULT_EXAMPLES,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tokenyard")

# A shell that starts a program in the background has it ignore Ctrl-C, and all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
SERVERS: tuple[ServerName, ...] = ("valkey", "redis")
#: Whether vLLM is installed: `make install-light` leaves it out.
HAS_VLLM = importlib.util.find_spec("vllm") is not None
#: Folders and files that need vLLM, or what comes with it, to be imported. Their tests are marked
#: `vllm`, and a run without that mark does not import them.
OF_VLLM = (
    "e2e",
    "engines",
    "foreign",
    "gateway",
    "gpu",
    "unit/benchmarks/test_serving.py",
    "unit/benchmarks/test_shape.py",
    "unit/engines/test_chat_parity.py",
    "unit/engines/test_sensors.py",
    "unit/engines/test_vllm_branches.py",
    "unit/engines/test_vllm_collectors.py",
    "unit/gateway",
)
LEFTOVER_GRACE_S = 30.0
NewServer = Callable[..., Server]

#: Folders of which nothing is in `make test`.
ALL_LONG = ("deploy", "engines", "model")


def pytest_report_header() -> list[str]:
    """Name what is not collected."""
    return [] if HAS_VLLM else [f"vLLM is not installed, so these are left out: {OF_VLLM}"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what need not, or cannot, be imported."""
    mark: str = config.option.markexpr
    left_out = OF_VLLM if not HAS_VLLM or "not vllm" in mark else ()
    left_out += ALL_LONG if "not long" in mark else ()
    if any(collection_path == HERE / name for name in left_out):
        return True
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `broker` or `own_broker` runs on Valkey, and on Redis: there it is `long`."""
    servers = ("valkey", pytest.param("redis", marks=pytest.mark.long))
    if any(metafunc.definition.iter_markers("valkey_only")):
        servers = ("valkey",)
    for name in {"broker", "own_broker"} & set(metafunc.fixturenames):
        metafunc.parametrize(name, servers, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole folders, and skip what needs vLLM where it is not installed."""
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        if place.startswith(OF_VLLM):
            item.add_marker(pytest.mark.vllm)
        if place.startswith(tuple(f"{name}/" for name in ALL_LONG)):
            item.add_marker(pytest.mark.long)
    if HAS_VLLM:
        return
    if os.environ.get("CI") == "true":
        raise pytest.UsageError("vLLM is not installed, so not everything would be tested")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make install)"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    begin_test()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine gets a loop of its own: of its fixture `loop_factory`, if any."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with asyncio.Runner(loop_factory=pyfuncitem.funcargs.get("loop_factory")) as runner:
        runner.run(pyfuncitem.obj(**arguments))
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Without vLLM, a run in which every test was skipped is no success."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if HAS_VLLM or reporter is None or session.exitstatus != pytest.ExitCode.OK:
        return
    if reporter.stats.get("skipped") and not reporter.stats.get("passed"):
        reporter.write_line("\nvLLM is not installed, and nothing else was tested", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(scope="session", autouse=True)
def no_leftover_processes() -> Iterator[None]:
    """Fails the run when a process that it started outlives it."""
    mark_descendants()
    yield
    stop_zygote()
    leftovers = end_leftovers(LEFTOVER_GRACE_S)
    assert not leftovers, "processes left behind:\n" + "\n".join(leftovers)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud what the skips above hide."""
    if terminalreporter.stats.get("skipped") and find_binary("redis") is None:
        terminalreporter.section("REDIS WAS NOT TESTED", red=True, bold=True)
        terminalreporter.line("Install redis-server (Debian: apt install redis-server).")


@pytest.fixture(scope="session")
def shared_server(
    no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[ServerName], Server]]:
    """The servers of this test process by name, each started when first asked for."""
    running: dict[ServerName, Server] = {}

    def get(name: ServerName) -> Server:
        if name not in running:
            running[name] = Server(name, required(name), tmp_path_factory.mktemp(name))
        running[name].start()
        return running[name]

    yield get
    for server in running.values():
        server.stop()


@pytest.fixture(scope="session")
def broker(request: pytest.FixtureRequest, shared_server: Callable[[ServerName], Server]) -> Server:
    """A server that all tests share, Valkey or Redis: leave it running."""
    return shared_server(request.param)


@pytest.fixture(scope="session")
def valkey_broker(
    no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The embedded server alone, for tests too slow to be run on both: leave it running.

    Not the one of `broker`, whose commands some tests count: yards live here for long.
    """
    server = Server("valkey", required("valkey"), tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def plant(valkey_broker: Server) -> Iterator[Plant]:
    """A yard of real processes, which the test starts and may kill."""
    with Plant(valkey_broker.url) as started:
        yield started


@pytest.fixture
def new_server(
    no_leftover_processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NewServer]:
    """Starts servers that belong to one test: ``new_server("redis", aof=True)``."""
    started: list[Server] = []

    def start(name: ServerName, *, aof: bool = True) -> Server:
        server = Server(name, required(name), tmp_path_factory.mktemp(name), aof=aof)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def own_broker(request: pytest.FixtureRequest, new_server: NewServer) -> Server:
    """A server with AOF that the test may stop, kill and start."""
    return new_server(request.param)


@pytest.fixture(scope="session")
def stand(
    request: pytest.FixtureRequest,
    shared_server: Callable[[ServerName], Server],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stand]:
    """The yard with real vLLM, one for all tests of a process; its `door` waits for a gateway.

    vLLM's own server starts beside it if a test is going to ask that: it takes long.
    """
    from tests.gateway.stand import running_stand

    asks_both = any("vllm" in getattr(item, "fixturenames", ()) for item in request.session.items)
    folder = tmp_path_factory.mktemp("stand")
    with running_stand(shared_server(SERVERS[0]), folder, asks_both=asks_both) as running:
        yield running


@pytest.fixture
def redis_url(broker: Server) -> str:
    """URL of `broker`."""
    return broker.url


@pytest.fixture
def fake_clock() -> Iterator[FakeClock]:
    """The clock of this process, which stands still until the test, or a sleeper, moves it."""
    with faked() as fake:
        yield fake


@pytest.fixture
def keys() -> Keys:
    """The keys of a yard that nobody else uses."""
    return Keys(random_name("yard"))


@pytest.fixture
def connection(broker: Server) -> Iterator[redis.Redis]:
    """A connection to `broker` that gives bytes."""
    with redis.Redis.from_url(broker.url, socket_timeout=30.0) as connected:
        yield connected


@pytest.fixture
def scripts(connection: redis.Redis, keys: Keys) -> Scripts:
    """The scripts of the test's yard on `broker`."""
    return Scripts(Yard(connection, keys))


@pytest.fixture
def counting(redis_url: str) -> Iterator[redis.Redis]:
    """A connection whose commands are in `Counting.sent`."""
    pool = redis.ConnectionPool.from_url(redis_url, connection_class=Counting)
    with redis.Redis(connection_pool=pool) as connection:
        connection.ping()
        Counting.sent.clear()
        yield connection
    pool.disconnect()
