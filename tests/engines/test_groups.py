"""Groups of warm processes on a CPU: same tokens, no new process, and the effects of a death.

The test acts as the controller: it starts the processes once and then only sends orders.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.on_cpu import needs_cpu
from worker.engines import RankGroup
from worker.engines.vllm.environment import (
    engine_environment,
    engine_modules,
    set_environment,
)

pytestmark = [pytest.mark.vllm, needs_cpu]

ADDER = Path(__file__).parents[2] / "examples" / "arithmetic" / "models" / "adder"
MODULES = ["worker.executor.leader", "worker.executor.follower", *engine_modules(cpu=True)]
ANSWER_S = 90.0
STUCK_S = 1.0
STUCK_STATUS = 3
PROMPTS = [
    f"{left}+{right}="
    for left, right in random.Random(4).choices(
        [(left, right) for left in range(100) for right in range(100)], k=100
    )
]
TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}


# Runs in the processes


class _Held:
    """The state of a process."""

    pipe: Connection
    engine: Any = None
    executor: Any = None
    loading: Any = None
    has_loaded = False


def live(pipe: Connection) -> None:
    """A warm process: obeys until its pipe ends."""
    _Held.pipe = pipe
    threading.excepthook = lambda _: os._exit(STUCK_STATUS)  # as worker.process.main does
    from vllm.platforms import current_platform

    from worker.engines.cpu_features import request_amx
    from worker.engines.vllm.warm_base import freeze
    from worker.executor import follower_link, leader_link

    current_platform.is_cpu()  # registers vLLM's kernels, as a worker's warm-up does
    leader_link.STUCK_S = follower_link.STUCK_S = STUCK_S
    for module in MODULES:
        importlib.import_module(module)
    request_amx()
    freeze()
    pipe.send(os.getpid())
    while True:
        try:
            function, arguments, named = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments, **named)))
        except Exception as fault:  # noqa: BLE001  # the test looks at it
            pipe.send((False, f"{type(fault).__name__}: {fault}"))


@contextmanager
def held_back() -> Iterator[None]:
    from worker.engines.vllm import warm_base

    with warm_base.held_back(has_kernels=_Held.has_loaded):
        yield


def load(group: RankGroup | None = None, **arguments: Any) -> None:
    from vllm import EngineArgs, LLMEngine

    from worker.executor import executor_for

    _Held.executor = executor_for(group) if group else None
    values: dict[str, Any] = {
        "model": str(ADDER),
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 32 * 2**20,
        "distributed_executor_backend": _Held.executor or "uni",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    with held_back():
        try:
            _Held.engine = LLMEngine.from_engine_args(EngineArgs(**values | arguments))
        except BaseException:
            if group:
                _Held.executor.release()
            raise
    _Held.has_loaded = True


def load_with_transfer(group: RankGroup) -> None:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    load(group, kv_transfer_config=transfer, **TENSOR)


def close() -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine, _Held.engine = _Held.engine, None
    with held_back():
        engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()


def attend(group: RankGroup) -> None:
    from worker import executor

    with held_back():
        executor.attend(group)
    _Held.has_loaded = True


def add_requests(prompts: list[str], max_tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    for number, prompt in enumerate(prompts):
        _Held.engine.add_request(str(number), prompt, params)


def generate(prompts: list[str]) -> list[list[int]]:
    """Greedy tokens for each prompt."""
    add_requests(prompts, max_tokens=8)
    tokens = {}
    while _Held.engine.has_unfinished_requests():
        for output in _Held.engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [tokens[number] for number in range(len(prompts))]


def generate_for_ever() -> None:
    """Generate without end; report the start."""
    _Held.pipe.send("running")
    while True:
        generate(PROMPTS)


def call(function: Callable[..., Any] | str, *arguments: Any, timeout: float | None = None) -> Any:
    """Call a function on each rank."""
    return _Held.engine.collective_rpc(function, timeout, arguments)


def executor() -> Any:
    return _Held.executor.formed


def check_health() -> None:
    executor().check_health()


def call_both_ways_round() -> list[Any]:
    """Make two calls and fetch their answers in reverse order."""
    first = executor().collective_rpc(rank_of, non_block=True)
    second = executor().collective_rpc(twice_the_rank_of, non_block=True, unique_reply_rank=1)
    return [second.result(), first.result()]


def call_until_broken(rank: int) -> None:
    """Make one call that fails without a waiter, and then more calls."""
    executor().collective_rpc(fail_on, args=(rank,), unique_reply_rank=0)
    while True:
        call(rank_of)


def rank_of(worker: Any) -> int:
    return int(worker.rank)


def twice_the_rank_of(worker: Any) -> int:
    return 2 * int(worker.rank)


def read_environment(_: Any, name: str) -> str | None:
    return os.environ.get(name)


def name_of_tensor_group(_: Any) -> str:
    from vllm.distributed import get_tp_group

    return str(get_tp_group().unique_name)


def rank_later(worker: Any) -> Any:
    """Like a step on a GPU: its output is computed when it is fetched."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Later(AsyncModelRunnerOutput):
        def get_output(self) -> Any:
            return worker.rank

    return Later()


def break_steps(worker: Any, rank: int) -> None:
    """From now on the model of this rank fails."""
    if worker.rank == rank:
        worker.model_runner.execute_model = partial(fail_on, worker, rank)


def fail_on(worker: Any, rank: int, *_: object) -> None:
    if worker.rank == rank:
        raise OSError("the disk is full")


def wait_for_word(worker: Any, fifo: str) -> None:
    """On rank 1, wait for a message."""
    if worker.rank == 1:
        Path(fifo).read_text()


def say_word(fifo: str) -> None:
    Path(fifo).write_text("go on")


def die_on(worker: Any, rank: int) -> None:
    if worker.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def reduce_without(worker: Any, dying: int) -> None:
    """One rank dies while the others wait for it in a reduction."""
    import torch
    from vllm.distributed import tensor_model_parallel_all_reduce

    die_on(worker, dying)
    tensor_model_parallel_all_reduce(torch.ones(4))


def break_loading() -> None:
    def fail(_: object) -> None:
        raise OSError("no such weights")

    _Held.loading = rank_class().load
    rank_class().load = fail


def mend_loading() -> None:
    rank_class().load = _Held.loading


def rank_class() -> Any:
    from worker.executor.rank import Rank

    return Rank


def named_shared_memory() -> list[str]:
    """Entries that would stay in /dev/shm if this process were killed now."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
    return [file for file in files if not file.endswith("(deleted)") and "/sem." not in file]


def footprint() -> tuple[int, int, int]:
    """Python threads, open files, and MiB of shared memory."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    shared = int(status["RssShmem"].split()[0]) // 1024
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), shared


# The test's view of them


_server = multiprocessing.get_context("forkserver")


class Warm:
    """A warm process of the pool."""

    def __init__(self) -> None:
        self._pipe, theirs = _server.Pipe()
        self.process = _server.Process(target=live, args=(theirs,))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self.process.pid

    def ask(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._pipe.send((function, arguments, named))

    def hear(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "no answer"
        return self._pipe.recv()

    def answer(self) -> Any:
        is_well, value = self.hear()
        assert is_well, value
        return value

    def fault(self) -> str:
        """The error that the function raised; "" if the process ended instead."""
        try:
            is_well, value = self.hear()
        except (EOFError, ConnectionResetError):
            return ""
        assert not is_well
        return str(value)

    def do(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.ask(function, *arguments, **named)
        return self.answer()

    def status(self) -> int | None:
        """The exit status, once it has ended."""
        self.process.join(ANSWER_S)
        return self.process.exitcode

    def end(self) -> None:
        self._pipe.close()
        self.process.join(5.0)
        self.process.kill()
        self.process.join()


class Pool:
    """Warm processes; the pool starts more if there are too few."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Warm] = []
        self._groups = 0

    def take(self, count: int = 2) -> list[Warm]:
        living = [warm for warm in self.processes if warm.process.is_alive()]
        missing = [Warm() for _ in range(count - len(living))]
        self.processes += missing
        for warm in missing:
            assert warm.hear() == warm.pid
        return (living + missing)[:count]

    def group(self) -> tuple[RankGroup, RankGroup]:
        """The arguments of a new group for its leader and for its follower."""
        self._groups += 1
        address = str(self.folder / f"group-{self._groups}")
        return RankGroup(address, 0, (0, 1)), RankGroup(address, 1, (0, 1))

    @contextmanager
    def formed(self, leader: Warm, follower: Warm, **arguments: Any) -> Iterator[None]:
        """A group for the duration of the block; not released if the test kills a rank."""
        leading, following = self.group()
        follower.ask(attend, following)
        leader.do(load, leading, **arguments)
        yield
        leader.do(close)
        follower.answer()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    set_environment(engine_environment(cpu=True))
    _server.set_forkserver_preload(MODULES)  # all are forked from one that has imported vLLM
    made = Pool(tmp_path_factory.mktemp("groups"))
    yield made
    for warm in made.processes:
        warm.end()


@pytest.fixture(scope="module")
def alone(pool: Pool) -> list[list[int]]:
    """The tokens of a single rank."""
    warm, *_ = pool.take()
    warm.do(load)
    tokens: list[list[int]] = warm.do(generate, PROMPTS)
    warm.do(close)
    return tokens


@pytest.mark.parametrize("parallel", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_two_ranks_give_the_tokens_of_one_without_a_new_process(
    pool: Pool, alone: list[list[int]], parallel: dict[str, int]
) -> None:
    first, second = pool.take()
    before = psutil.Process().children(recursive=True)

    with pool.formed(first, second, **parallel):
        assert first.do(generate, PROMPTS) == alone
    with pool.formed(second, first, **parallel):  # with roles swapped
        assert second.do(generate, PROMPTS) == alone
        assert psutil.Process().children(recursive=True) == before
    for warm in (first, second):  # and each alone
        warm.do(load)
        assert warm.do(generate, PROMPTS[:10]) == alone[:10]
        warm.do(close)


def test_a_released_group_leaves_nothing_behind(pool: Pool) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):  # creates the parts that stay for good
        first.do(generate, PROMPTS[:10])
    before = first.do(footprint), second.do(footprint)

    with pool.formed(first, second, **TENSOR):
        first.do(generate, PROMPTS[:10])
        # Nor anything that would outlive a killed process.
        assert first.do(named_shared_memory) == []

    assert (first.do(footprint), second.do(footprint)) == before
    assert list(pool.folder.iterdir()) == []


def test_each_rank_answers_and_a_failing_rank_is_named(pool: Pool, alone: list[list[int]]) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):
        assert first.do(call, rank_of) == [0, 1]

        first.ask(call, fail_on, 1)
        assert first.fault() == "GroupError: rank 1 of the group failed: OSError: the disk is full"
        first.ask(call, fail_on, 0)
        assert first.fault() == "OSError: the disk is full"

        # Unfetched answers are not taken for later ones.
        assert first.do(call, rank_of) == [0, 1]
        assert first.do(generate, PROMPTS) == alone
        first.do(check_health)


def test_answers_are_fetched_on_demand_and_in_any_order(pool: Pool) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):
        assert first.do(call_both_ways_round) == [2, [0, 1]]
        assert first.do(call, rank_later) == [0, 1]


def test_ranks_share_environment_and_names_whatever_they_did_before(pool: Pool) -> None:
    first, second = pool.take()
    first.do(load)
    first.do(close)  # it has now been in more of vLLM's groups than the other
    first.do(set_environment, {"VLLM_LOGGING_PREFIX": "~"})

    with pool.formed(first, second, **TENSOR):
        assert first.do(call, name_of_tensor_group) == ["tp:0", "tp:0"]
        assert first.do(call, read_environment, "VLLM_LOGGING_PREFIX") == ["~", "~"]


def test_a_failure_without_a_waiter_breaks_the_group(pool: Pool) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):
        first.ask(call_until_broken, 1)
        assert first.fault() == "GroupError: rank 1 of the group failed: OSError: the disk is full"


def test_every_step_after_a_failed_one_fails(pool: Pool) -> None:
    first, second = pool.take()
    with pool.formed(first, second, **PIPELINE):
        first.do(call, break_steps, 1)

        for _ in range(2):
            first.ask(generate, PROMPTS[:10])
            assert "rank 1 of the group failed: OSError: the disk is full" in first.fault()


def test_unsupported_settings_of_a_group_are_refused(pool: Pool) -> None:
    first, second = pool.take()
    leading, following = pool.group()
    second.ask(attend, following)

    first.ask(load_with_transfer, leading)

    assert first.fault().startswith("Unsupported: a group of warm processes supports neither")
    second.answer()


def test_a_late_answer_raises_a_timeout(pool: Pool, tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    first, second = pool.take()
    with pool.formed(first, second, **TENSOR):
        first.ask(call, wait_for_word, fifo, timeout=0.05)
        assert first.fault() == "TimeoutError: rank 1 of the group did not answer in time"

        first.do(say_word, fifo)

        assert first.do(call, rank_of) == [0, 1]


def test_a_group_of_the_wrong_size_is_refused(pool: Pool) -> None:
    first, second = pool.take()
    leading, following = pool.group()
    second.ask(attend, following)

    first.ask(load, leading)

    assert "this model takes 1 ranks" in first.fault()
    second.answer()  # warm again


def test_a_missing_model_sends_the_follower_home(pool: Pool) -> None:
    first, second = pool.take()
    leading, following = pool.group()
    second.ask(attend, following)

    first.ask(load, leading, model="/nowhere", **TENSOR)

    assert "nowhere" in first.fault()
    second.answer()


def test_an_engine_that_fails_after_the_group_has_formed_releases_it(
    pool: Pool, alone: list[list[int]]
) -> None:
    first, second = pool.take()
    leading, following = pool.group()
    second.ask(attend, following)

    first.ask(load, leading, kv_cache_memory_bytes=1, **TENSOR)

    assert first.fault().startswith("ValueError: ")
    second.answer()
    with pool.formed(second, first, **TENSOR):
        assert second.do(generate, PROMPTS[:10]) == alone[:10]


def test_a_follower_that_cannot_load_is_named_and_stays_warm(
    pool: Pool, alone: list[list[int]]
) -> None:
    first, second = pool.take()
    leading, following = pool.group()
    second.do(break_loading)
    second.ask(attend, following)

    first.ask(load, leading, **TENSOR)

    assert first.fault() == "GroupError: rank 1 of the group failed: OSError: no such weights"
    second.answer()
    assert first.do(named_shared_memory) == []
    assert list(pool.folder.iterdir()) == []
    second.do(mend_loading)
    with pool.formed(first, second, **TENSOR):
        assert first.do(generate, PROMPTS[:10]) == alone[:10]


@pytest.mark.crash
def test_a_follower_that_dies_during_a_wait_for_it_breaks_the_group(pool: Pool) -> None:
    leader, follower = pool.take()
    leading, following = pool.group()
    follower.ask(attend, following)
    leader.do(load, leading, **TENSOR)

    leader.ask(call, die_on, 1)

    assert leader.fault() == "GroupError: rank 1 of the group has died"
    leader.ask(call, rank_of)
    assert leader.fault() == "GroupError: rank 1 of the group has died"
    leader.do(close)
    assert follower.status() == -signal.SIGKILL


@pytest.mark.crash
def test_a_follower_killed_during_generation_breaks_the_group(pool: Pool) -> None:
    """vLLM's CPU backend waits for a dead rank forever; then the leader's process must end."""
    leader, follower = pool.take()
    leading, following = pool.group()
    follower.ask(attend, following)
    leader.do(load, leading, **TENSOR)
    leader.ask(generate_for_ever)
    assert leader.hear() == "running"

    follower.process.kill()

    fault = leader.fault()
    assert "rank 1 of the group has died" in fault or leader.status() == STUCK_STATUS
    if fault:
        leader.do(close)


@pytest.mark.crash
def test_a_leader_that_dies_frees_a_follower_that_waits_for_calls(pool: Pool) -> None:
    leader, follower = pool.take()
    leading, following = pool.group()
    follower.ask(attend, following)
    leader.do(load, leading, **TENSOR)

    leader.process.kill()

    assert follower.fault() == "GroupError: the leader of the group has died"


@pytest.mark.crash
def test_a_leader_that_dies_ends_a_follower_that_waits_inside_vllm(pool: Pool) -> None:
    leader, follower = pool.take()
    leading, following = pool.group()
    follower.ask(attend, following)
    leader.do(load, leading, **TENSOR)

    leader.ask(call, reduce_without, 0)

    assert follower.fault() == ""
    assert follower.status() == STUCK_STATUS
    assert list(Path("/dev/shm").glob(f"*{Path(leading.address).name}*")) == []
