"""Two backends hold a model together: load, sleep, wake and unload, as with one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.engines.harness import answers, spec_of
from tests.engines.in_process import InProcessBackend
from tests.engines.on_cpu import needs_cpu
from worker import executor
from worker.engines import Backend, RankGroup
from worker.engines.vllm.backend import CoreBackend
from worker.engines.vllm.environment import engine_environment, set_environment

pytestmark = [pytest.mark.vllm, needs_cpu]

WAIT_S = 90


def _follow(pipe: Connection) -> None:
    """Join each group that comes through the pipe; report when this process is warm again."""
    set_environment(engine_environment(cpu=True))
    core = CoreBackend(cores=[max(os.sched_getaffinity(0))], groups=executor)
    backend = InProcessBackend(core)
    backend.warm_up()
    while True:
        pipe.send(backend.memory())
        try:
            backend.attend(pipe.recv())
        except EOFError:
            return


@pytest.fixture(scope="module")
def follower() -> Iterator[Connection]:
    """The pipe to another warm process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_follow, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.poll(WAIT_S)
    yield ours
    ours.close()
    process.join(WAIT_S)
    process.kill()


@pytest.fixture
def invite(follower: Connection, tmp_path: Path) -> Iterator[Callable[[], RankGroup]]:
    """Return a function that forms a new group of this process, as leader, and the follower."""
    attended = []

    def make() -> RankGroup:
        address = str(tmp_path / f"group-{len(attended)}")
        follower.recv()  # it reports that it is warm
        follower.send(RankGroup(address, 1, (0, 1)))
        attended.append(address)
        return RankGroup(address, 0, (0, 1))

    yield make
    assert follower.poll(WAIT_S), "the follower has not come back"


def test_a_group_sleeps_and_wakes_as_one(backend: Backend, invite: Callable[[], RankGroup]) -> None:
    # Given the tokens of one process, and then a group of two
    engine = backend.load(spec_of("adder"))
    said = answers(engine)
    engine.close()
    engine = backend.load(spec_of("adder", tensor_parallel_size=2), invite())
    assert answers(engine) == said

    # If it sleeps at each level; the second rank's share of the vocabulary is empty
    for level in (1, 2, 2, 1):
        engine.sleep(level)
        engine.wake()

        # I expect the same tokens after each.
        assert answers(engine) == said
    assert "group" in engine.info.phases_s
    engine.close()


def test_every_rank_reads_other_weights(backend: Backend, invite: Callable[[], RankGroup]) -> None:
    # Given the tokens of one process with its own weights and with others
    other = spec_of("subtractor").path
    said = []
    engine = backend.load(spec_of("adder"))
    for path in ("", other):
        engine.reload(path)
        said.append(answers(engine))
    engine.close()

    # If a group of two loads them at the start, or changes to them later
    engine = backend.load(spec_of("adder", tensor_parallel_size=2), invite(), weights=other)
    first = answers(engine)
    engine.reload("")
    second = answers(engine)
    engine.reload(other)

    # I expect the same tokens.
    assert [second, first] == said
    assert answers(engine) == said[1]
    assert said[0] != said[1]
    engine.close()


def test_a_broken_model_ends_its_group_and_the_next_group_forms(
    backend: Backend, invite: Callable[[], RankGroup], tmp_path: Path
) -> None:
    # for a path that is no folder vLLM asks the hub, or an offline setting stops it
    with pytest.raises((OSError, ValueError), match="nowhere"):
        backend.load(spec_of("adder", tmp_path / "nowhere", tensor_parallel_size=2), invite())

    engine = backend.load(spec_of("adder", tensor_parallel_size=2), invite())

    assert answers(engine)
    engine.close()
