"""What a test calls in the processes of a group: a warm process, its engine, and its faults."""

from __future__ import annotations

import importlib
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

from worker.engines import RankGroup
from worker.engines.vllm.environment import engine_modules

ADDER = Path(__file__).parents[2] / "examples" / "arithmetic" / "models" / "adder"
MODULES = ["worker.executor.leader", "worker.executor.follower", *engine_modules(cpu=True)]
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
    from worker.executor import follower, leader_link

    current_platform.is_cpu()  # registers vLLM's kernels, as a worker's warm-up does
    leader_link.STUCK_S = follower.STUCK_S = STUCK_S
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
