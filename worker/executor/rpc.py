"""Calls to the followers of a group and their answers, over vLLM's message queues.

All calls go through one queue, which every follower reads; each follower has its own queue
for answers. Calls are numbered, so that a late answer is not mistaken for the answer to a later
call.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq
from vllm import envs
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue

from tokenyard import clock
from worker.executor.messages import GroupError

MEET_S: Final = 30.0  # until both ends of a queue are connected
SEND_S: Final = 300.0  # until the slowest reader has room
_CHUNKS: Final = 10  # as in vLLM's own executors


@dataclass(frozen=True, slots=True)
class RpcCall:
    """To all followers: run a method of the worker."""

    number: int
    method: str | bytes  # a name, or a function packed by cloudpickle
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answers: int | None  # the one rank that answers; None: all do

    def wants_answer_of(self, rank: int) -> bool:
        """Whether this rank must answer."""
        return self.answers in {None, rank}


@dataclass(frozen=True, slots=True)
class RpcAnswer:
    """From a follower: the output, or the error in one line."""

    number: int
    output: Any = None
    error: str | None = None


def make_queue(readers: list[int], stages: int) -> MessageQueue:
    """A queue of this process that other processes of the host read.

    Each of the ``stages`` of a pipeline can have two calls in flight. In a shorter queue the first
    stage would wait for the last, which waits for the first to read its answer.
    """
    return MessageQueue(
        len(readers),
        len(readers),
        local_reader_ranks=readers,
        max_chunk_bytes=envs.VLLM_MQ_MAX_CHUNK_BYTES_MB * 2**20,  # larger ones go through a socket
        max_chunks=max(_CHUNKS, 4 * stages),
    )


def meet(queue: Any) -> None:
    """Wait until all ends of a queue are connected; all ends must call this in the same order.

    Raises `GroupError` after `MEET_S` seconds.
    """
    queue.local_socket.setsockopt(zmq.RCVTIMEO, int(MEET_S * 1000))
    try:
        queue.wait_until_ready()
    except zmq.Again:
        raise GroupError(f"a message queue was not connected within {MEET_S:g} s") from None


def hang_up(queue: Any) -> None:
    """Close the sockets of a queue; idempotent.

    Python may collect them with their context in an order that blocks forever. vLLM 0.32 handles
    that itself.
    """
    condition = getattr(queue, "_spin_condition", None)
    names = ("local_notify_socket", "read_cancel_socket", "write_cancel_socket")
    for socket in (*(getattr(condition, name, None) for name in names), queue.local_socket):
        if socket is not None:
            socket.close(linger=0)


class RpcChannel:
    """The leader's end of all queues. One thread calls, and another may wake it."""

    def __init__(self, ranks: int, stages: int) -> None:
        self._calls = make_queue(list(range(1, ranks)), stages)
        self._answers: dict[int, MessageQueue] = {}
        self._number = 0
        self._unsettled: deque[PendingRpc] = deque()

    @property
    def handle(self) -> Handle:
        """The handle of the queue of calls, for followers."""
        return self._calls.export_handle()

    def connect(self, answers: Mapping[int, Handle]) -> None:
        """Connect to the followers; ``answers`` has the handles of their queues by rank."""
        self._answers = {
            rank: MessageQueue.create_from_handle(handle, 0) for rank, handle in answers.items()
        }
        for queue in (self._calls, *self._answers.values()):
            meet(queue)
        unname(self._calls)

    def close(self) -> None:
        """Close all queues; idempotent."""
        for queue in (self._calls, *self._answers.values()):
            hang_up(queue)
        self._answers.clear()
        self._unsettled.clear()

    def wake(self) -> None:
        """Interrupt all waits for answers with an exception; called by another thread."""
        queues: list[Any] = list(self._answers.values())  # `shutdown` has no type
        for queue in queues:
            queue.shutdown()

    def send(
        self,
        method: str | bytes,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        answers: int | None,
    ) -> int:
        """Call all followers; returns the number of the call."""
        self._number += 1
        self._calls.enqueue(RpcCall(self._number, method, args, kwargs, answers), timeout=SEND_S)
        return self._number

    def expect(self, pending: PendingRpc) -> None:
        """Register a call whose answers will be fetched."""
        self._unsettled.append(pending)

    def settle(self, pending: PendingRpc) -> None:
        """Fetch the answers to a call, and before them those to all earlier ones."""
        while not pending.done():
            self._unsettled.popleft().settle()

    def answer(self, rank: int, number: int, until: float | None) -> Any:
        """A follower's output of a call. Raises `GroupError`, or `TimeoutError` at ``until``."""
        queue = self._answers[rank]
        while True:
            left = None if until is None else max(0.0, until - clock.monotonic())
            try:
                answer: RpcAnswer = queue.dequeue(timeout=left)
            except TimeoutError:
                raise TimeoutError(f"rank {rank} of the group did not answer in time") from None
            if answer.number < number:
                continue  # the answer to an abandoned call
            if answer.error is not None:
                raise GroupError(f"rank {rank} of the group failed: {answer.error}")
            return answer.output


class PendingRpc(Future[Any]):
    """The answers to one call, fetched on demand."""

    def __init__(self, calls: RpcChannel, fetch: Callable[[], Any]) -> None:
        super().__init__()
        self._calls = calls
        self._fetch = fetch
        calls.expect(self)

    def result(self, timeout: float | None = None) -> Any:
        """The answers; ``timeout`` is ignored, the call has its own."""
        del timeout
        self._calls.settle(self)
        return super().result()

    def settle(self) -> None:
        """Fetch the answers now."""
        try:
            self.set_result(self._fetch())
        except Exception as error:  # noqa: BLE001  # raised by `result`
            self.set_exception(error)


# Shared memory of a group that is freed with its last user, even if that process is killed. A name
# in /dev/shm outlives a killed process, so names are removed once every rank has opened the memory.

_FOLDER = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory is on Linux


def unname(queue: MessageQueue) -> None:
    """Remove the name of a queue's memory; only its creator may, once all readers have it."""
    ring = queue.buffer
    if ring.is_creator:
        ring.shared_memory.unlink()
        ring.is_creator = False  # else the queue unlinks the name again when it is deleted


class Segments:
    """The shared memory of reductions in vLLM's CPU backend.

    vLLM keeps it mapped until the process ends, group after group. Freeing its pages makes such a
    mapping cost nothing.
    """

    def __init__(self, marked: str) -> None:
        """Open and unname all segments whose name contains ``marked``; on a GPU there are none."""
        self._maps: list[mmap.mmap] = []
        for path in _FOLDER.glob(f"*{marked}*"):
            with path.open("r+b") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0))
            path.unlink()

    def free(self) -> None:
        """Free the pages; no rank may use them afterwards; idempotent."""
        for segment in self._maps:
            segment.madvise(mmap.MADV_REMOVE)
            segment.close()
        self._maps.clear()
