"""Groups of warm processes on a CPU: same tokens, no new process, and the effects of a death.

The test acts as the controller: it starts the processes once and then only sends orders.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines import rank_calls as ranks
from tests.engines.on_cpu import needs_cpu
from tests.engines.rank_calls import PIPELINE, PROMPTS, TENSOR
from tests.engines.rank_processes import Pool, forkserver
from worker.engines.vllm.environment import engine_environment, set_environment

pytestmark = [pytest.mark.vllm, needs_cpu]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    set_environment(engine_environment(cpu=True))
    forkserver.set_forkserver_preload(ranks.MODULES)  # all are forked from one with vLLM
    made = Pool(tmp_path_factory.mktemp("groups"))
    yield made
    for warm in made.processes:
        warm.end()


@pytest.fixture(scope="module")
def alone(pool: Pool) -> list[list[int]]:
    """The tokens of a single rank."""
    warm, *_ = pool.take()
    warm.do(ranks.load)
    tokens: list[list[int]] = warm.do(ranks.generate, PROMPTS)
    warm.do(ranks.close)
    return tokens


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_two_ranks_give_the_tokens_of_one_without_a_new_process(
    pool: Pool, alone: list[list[int]], parallel: dict[str, int]
) -> None:
    first, second = pool.take()
    before = psutil.Process().children(recursive=True)

    with pool.formed(first, second, **parallel):
        assert first.do(ranks.generate, PROMPTS) == alone
    with pool.formed(second, first, **parallel):  # with roles swapped
        assert second.do(ranks.generate, PROMPTS) == alone
        assert psutil.Process().children(recursive=True) == before
    for warm in (first, second):  # and each alone
        warm.do(ranks.load)
        assert warm.do(ranks.generate, PROMPTS[:10]) == alone[:10]
        warm.do(ranks.close)


def test_a_released_group_leaves_nothing_behind(pool: Pool) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):  # creates the parts that stay for good
        first.do(ranks.generate, PROMPTS[:10])
    before = first.do(ranks.footprint), second.do(ranks.footprint)

    with pool.formed(first, second, **TENSOR):
        first.do(ranks.generate, PROMPTS[:10])
        # Nor anything that would outlive a killed process.
        assert first.do(ranks.named_shared_memory) == []

    assert (first.do(ranks.footprint), second.do(ranks.footprint)) == before
    assert list(pool.folder.iterdir()) == []


def test_each_rank_answers_and_a_failing_rank_is_named(pool: Pool, alone: list[list[int]]) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):
        assert first.do(ranks.call, ranks.rank_of) == [0, 1]

        first.ask(ranks.call, ranks.fail_on, 1)
        assert first.fault() == "GroupError: rank 1 of the group failed: OSError: the disk is full"
        first.ask(ranks.call, ranks.fail_on, 0)
        assert first.fault() == "OSError: the disk is full"

        # Unfetched answers are not taken for later ones.
        assert first.do(ranks.call, ranks.rank_of) == [0, 1]
        assert first.do(ranks.generate, PROMPTS) == alone
        first.do(ranks.check_health)


def test_answers_are_fetched_on_demand_and_in_any_order(pool: Pool) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):
        assert first.do(ranks.call_both_ways_round) == [2, [0, 1]]
        assert first.do(ranks.call, ranks.rank_later) == [0, 1]


def test_ranks_share_environment_and_names_whatever_they_did_before(pool: Pool) -> None:
    first, second = pool.take()
    first.do(ranks.load)
    first.do(ranks.close)  # it has now been in more of vLLM's groups than the other
    first.do(set_environment, {"VLLM_LOGGING_PREFIX": "~"})

    with pool.formed(first, second, **TENSOR):
        assert first.do(ranks.call, ranks.name_of_tensor_group) == ["tp:0", "tp:0"]
        assert first.do(ranks.call, ranks.read_environment, "VLLM_LOGGING_PREFIX") == ["~", "~"]


def test_a_failure_without_a_waiter_breaks_the_group(pool: Pool) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):
        first.ask(ranks.call_until_broken, 1)
        assert first.fault() == "GroupError: rank 1 of the group failed: OSError: the disk is full"


def test_every_step_after_a_failed_one_fails(pool: Pool) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **PIPELINE):
        first.do(ranks.call, ranks.break_steps, 1)

        for _ in range(2):
            first.ask(ranks.generate, PROMPTS[:10])
            assert "rank 1 of the group failed: OSError: the disk is full" in first.fault()


@pytest.mark.parametrize(
    ("load", "named", "said"),
    [
        (ranks.load_with_transfer, {}, "Unsupported: a group of warm processes supports neither"),
        (ranks.load, {}, "this model takes 1 ranks"),
        (ranks.load, {"model": "/nowhere", **TENSOR}, "nowhere"),
    ],
    ids=["unsupported settings", "a wrong size", "a missing model"],
)
def test_a_load_that_is_refused_sends_the_follower_home(
    pool: Pool, load: Callable[..., None], named: dict[str, Any], said: str
) -> None:
    first, second = pool.take()

    first.ask(load, pool.invite(second), **named)

    assert said in first.fault()
    second.answer()  # warm again


def test_a_late_answer_raises_a_timeout(pool: Pool, tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):
        first.ask(ranks.call, ranks.wait_for_word, fifo, timeout=0.05)
        assert first.fault() == "TimeoutError: rank 1 of the group did not answer in time"

        first.do(ranks.say_word, fifo)

        assert first.do(ranks.call, ranks.rank_of) == [0, 1]


def test_an_engine_that_fails_after_the_group_has_formed_releases_it(
    pool: Pool, alone: list[list[int]]
) -> None:
    first, second = pool.take()
    leading = pool.invite(second)

    first.ask(ranks.load, leading, kv_cache_memory_bytes=1, **TENSOR)

    assert first.fault().startswith("ValueError: ")
    second.answer()
    with pool.formed(second, first, **TENSOR):
        assert second.do(ranks.generate, PROMPTS[:10]) == alone[:10]


def test_a_follower_that_cannot_load_is_named_and_stays_warm(
    pool: Pool, alone: list[list[int]]
) -> None:
    first, second = pool.take()
    second.do(ranks.break_loading)
    leading = pool.invite(second)

    first.ask(ranks.load, leading, **TENSOR)

    assert first.fault() == "GroupError: rank 1 of the group failed: OSError: no such weights"
    second.answer()
    assert first.do(ranks.named_shared_memory) == []
    assert list(pool.folder.iterdir()) == []
    second.do(ranks.mend_loading)
    with pool.formed(first, second, **TENSOR):
        assert first.do(ranks.generate, PROMPTS[:10]) == alone[:10]


@pytest.mark.crash
def test_a_follower_that_dies_during_a_wait_for_it_breaks_the_group(pool: Pool) -> None:
    leader, follower = pool.led()

    leader.ask(ranks.call, ranks.die_on, 1)

    assert leader.fault() == "GroupError: rank 1 of the group has died"
    leader.ask(ranks.call, ranks.rank_of)
    assert leader.fault() == "GroupError: rank 1 of the group has died"
    leader.do(ranks.close)
    assert follower.status() == -signal.SIGKILL


@pytest.mark.crash
def test_a_follower_killed_during_generation_breaks_the_group(pool: Pool) -> None:
    """vLLM's CPU backend waits for a dead rank forever; then the leader's process must end."""
    leader, follower = pool.led()
    leader.ask(ranks.generate_for_ever)
    assert leader.hear() == "running"

    follower.process.kill()

    fault = leader.fault()
    assert "rank 1 of the group has died" in fault or leader.status() == ranks.STUCK_STATUS
    if fault:
        leader.do(ranks.close)


@pytest.mark.crash
def test_a_leader_that_dies_frees_a_follower_that_waits_for_calls(pool: Pool) -> None:
    leader, follower = pool.led()

    leader.process.kill()

    assert follower.fault() == "GroupError: the leader of the group has died"


@pytest.mark.crash
def test_a_leader_that_dies_ends_a_follower_that_waits_inside_vllm(pool: Pool) -> None:
    leader, follower = pool.led()

    leader.ask(ranks.call, ranks.reduce_without, 0)

    fault = follower.fault()
    # vLLM's CPU backend waits through shared memory for ever, and without AVX-512 by sockets, which
    # tell that the other side is gone.
    died = fault == "GroupError: the leader of the group has died"
    assert died or (not fault and follower.status() == ranks.STUCK_STATUS)
    assert list(Path("/dev/shm").glob(f"*{pool.address.name}*")) == []
