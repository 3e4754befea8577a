"""A process that simulates models: its life, its groups, and its crash points."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.harness import ask, exit_status, greedy, run
from tests.support.fake_clock import FakeClock
from tokenyard.protocol.settings import WorkerSettings
from worker.engines import RankGroup, Unsupported
from worker.engines.loading import make_backend
from worker.engines.simulated.backend import SimulatedBackend
from worker.engines.simulated.engine import BROKEN
from worker.models import AdapterSpec, ModelSpec

SPEC = ModelSpec("pretended", "anything", max_num_seqs=3, max_model_len=64, revision="r1")
WAIT_S = 120


def test_a_backend_serves_what_the_model_specifies() -> None:
    backend = SimulatedBackend()
    assert sum(backend.warm_up().values()) == 0

    engine = backend.load(SPEC)

    info = engine.info
    assert (info.engine, info.model, info.revision) == ("simulated", "pretended", "r1")
    assert (info.max_num_seqs, info.max_model_len, info.adapters) == (3, 64, ())
    assert list(info.phases_s) == ["weights"]
    assert len(run(engine, greedy())[0].tokens) == 12


def test_one_model_follows_another_and_memory_returns() -> None:
    backend = SimulatedBackend()
    before = backend.memory()

    for name in ("first", "second"):
        engine = backend.load(ModelSpec(name, "anything"))
        assert engine.info.model == name
        engine.close()

    assert backend.memory() == before


def test_adapters_are_only_names() -> None:
    adapters = (AdapterSpec("left", "a"), AdapterSpec("right", "b"))
    engine = SimulatedBackend().load(ModelSpec("base", "anything", adapters=adapters))

    (outcome,) = run(engine, ask(model="left", max_tokens=2))

    assert engine.info.adapters == ("left", "right")
    assert len(outcome.tokens) == 2


def test_a_broken_model_is_refused_and_the_next_one_loads() -> None:
    backend = SimulatedBackend()

    with pytest.raises(RuntimeError, match="broken model"):
        backend.load(ModelSpec("any", BROKEN))

    assert backend.load(SPEC).info.model == "pretended"


def test_other_weights_replace_the_own_ones_at_the_start_and_later() -> None:
    backend = SimulatedBackend()
    own = run(backend.load(SPEC), greedy())[0].tokens

    engine = backend.load(SPEC, weights="/checkpoints/7")
    other = run(engine, greedy())[0].tokens
    engine.reload(SPEC.path)

    assert other != own
    assert run(engine, greedy())[0].tokens == own
    engine.reload("/checkpoints/7")
    assert run(engine, greedy())[0].tokens == other
    assert engine.info.weights == "/checkpoints/7"


def test_broken_weights_are_refused_and_the_previous_ones_stay() -> None:
    backend = SimulatedBackend()
    engine = backend.load(SPEC, weights="/checkpoints/7")
    before = run(engine, greedy())[0].tokens

    with pytest.raises(Unsupported, match="broken weights"):
        engine.reload(f"/checkpoints/{BROKEN}")
    with pytest.raises(Unsupported, match="broken weights"):
        backend.load(SPEC, weights=f"/checkpoints/{BROKEN}")

    assert engine.info.weights == "/checkpoints/7"
    assert run(engine, greedy())[0].tokens == before


def test_loading_takes_the_configured_time(fake_clock: FakeClock) -> None:
    settings = WorkerSettings(
        redis_url="redis://nowhere", engine="simulated", simulated_load_s=60.0
    )

    began = fake_clock.now
    engine = make_backend(settings, "").load(SPEC)

    assert fake_clock.now - began == 60.0
    assert engine.info.phases_s["weights"] == 60.0


# ------------------------------------------------------------------------------------- groups


@pytest.fixture
def group(tmp_path: Path) -> RankGroup:
    """Two processes, as the leader knows them."""
    return RankGroup(str(tmp_path / "group"), 0, (0, 1))


@pytest.fixture
def followers() -> Iterator[ThreadPoolExecutor]:
    """Threads in place of other processes."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.mark.parametrize("leader_first", [True, False])
def test_a_follower_stays_until_its_leader_releases_it(
    group: RankGroup, followers: ThreadPoolExecutor, leader_first: bool
) -> None:
    def attend() -> None:
        SimulatedBackend().attend(RankGroup(group.address, 1, group.devices))

    def lead() -> object:
        return SimulatedBackend().load(SPEC, group)

    first, second = (lead, attend) if leader_first else (attend, lead)
    begun = [followers.submit(first), followers.submit(second)]
    loading, attending = begun if leader_first else reversed(begun)

    engine = loading.result(WAIT_S)

    assert list(engine.info.phases_s) == ["weights", "group"]
    assert not attending.done()
    engine.close()
    engine.close()
    attending.result(WAIT_S)
    assert not Path(group.address).exists()


def _lead_and_die(group: RankGroup) -> None:
    SimulatedBackend(crash_point="asleep").load(SPEC, group).sleep(1)


@pytest.mark.crash
def test_a_follower_notices_the_death_of_its_leader(
    group: RankGroup, followers: ThreadPoolExecutor
) -> None:
    follower = RankGroup(group.address, 1, group.devices)
    attending = followers.submit(SimulatedBackend().attend, follower)

    assert exit_status(_lead_and_die, group) == -signal.SIGKILL
    with pytest.raises(ConnectionError, match="leader"):
        attending.result(WAIT_S)


# -------------------------------------------------------------------------------- crash points


def _live(crash_point: str, address: str) -> None:
    """A whole life: a model twice, a sleep, and a group."""
    backend = SimulatedBackend(crash_point=crash_point)
    backend.warm_up()
    for _ in range(2):
        engine = backend.load(SPEC)
        engine.sleep(1)
        engine.wake()
        engine.close()
    leader = threading.Thread(
        target=lambda: SimulatedBackend().load(SPEC, RankGroup(address, 0, (0, 1))).close(),
        daemon=True,
    )
    leader.start()
    backend.attend(RankGroup(address, 1, (0, 1)))


@pytest.mark.crash
@pytest.mark.parametrize(
    ("crash_point", "status"),
    [
        *((place, -signal.SIGKILL) for place in ("warming", "loading:2", "asleep:2", "waking:2")),
        *((place, -signal.SIGKILL) for place in ("unloading:2", "attached")),
        ("loading:3", 0),
        ("", 0),
    ],
)
def test_a_process_dies_in_each_configured_state(
    crash_point: str, status: int, tmp_path: Path
) -> None:
    assert exit_status(_live, crash_point, str(tmp_path / "group")) == status
