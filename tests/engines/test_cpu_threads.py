"""Each engine on a CPU computes on its own cores, however its process was started."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from worker.engines.loading import cpu_share
from worker.engines.vllm.environment import engine_environment, requested_threads, set_environment

pytestmark = pytest.mark.vllm

#: Numbers in a matrix product that is large enough for several threads.
WIDTH = 512


def _busy_threads(pipe: Connection, cores: list[int], *, forks: bool) -> None:
    """Compute on these cores for a while; return how many threads worked, and their cores."""
    set_environment(engine_environment(cpu=True))
    import torch

    if forks:
        # Like the fork-server: it has imported torch, and this is another process.
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
    from worker.engines.vllm.backend import use_cores

    use_cores(cores)
    before = _ticks()
    some = torch.ones(WIDTH, WIDTH)
    while sum(_ticks().values()) - sum(before.values()) < 50:
        torch.matmul(some, some)
    worked = [thread for thread, ticks in _ticks().items() if ticks - before.get(thread, 0) > 5]
    pipe.send((len(worked), torch.get_num_threads(), sorted(os.sched_getaffinity(0))))
    pipe.close()
    if forks:
        os._exit(0)


def _ticks() -> dict[str, int]:
    """CPU time of each thread of this process, in hundredths of a second."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        found[thread.name] = int(fields[11]) + int(fields[12])
    return found


@pytest.mark.parametrize("forks", [False, True], ids=["spawned", "forked"])
@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_computes_with_a_thread_for_each_core(
    monkeypatch: pytest.MonkeyPatch, count: int, forks: bool
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TOKENYARD_OMP_NUM_THREADS", raising=False)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_busy_threads, args=(theirs, allowed[:count]), kwargs={"forks": forks}
    )
    process.start()
    theirs.close()

    worked, threads, cores = ours.recv() if ours.poll(100) else (0, 0, [])
    process.join(20)

    assert (worked, threads) == (count, count)
    # Two or more threads are bound; a single thread may run on any of the cores.
    assert cores == (allowed[:count] if count > 1 else allowed)


def test_settings_of_the_operator_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENYARD_OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    for _ in range(2):  # in the controller, and again in a process that inherits from it
        set_environment(engine_environment(cpu=True))

    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert requested_threads() == 3


@pytest.mark.parametrize(
    ("cores", "slots", "shares"),
    [
        ([3], 1, [[3]]),
        ([0, 1], 1, [[0]]),  # one core is left to the threads that feed the engine
        ([0, 1], 2, [[0], [1]]),
        ([2, 4, 6, 8, 9], 2, [[2, 4], [6, 8]]),
        ([2, 4, 6, 8], 2, [[2], [4, 6]]),
        ([0, 1], 3, [[0], [1], [0]]),
    ],
)
def test_cores_are_shared_out(cores: list[int], slots: int, shares: list[list[int]]) -> None:
    assert [cpu_share(cores, slots, slot) for slot in range(slots)] == shares
