"""A follower of a group, which runs the calls of a leader, and its connection to it."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Final, NoReturn, TypeVar

import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.outputs import AsyncModelRunnerOutput

from tokenyard import clock
from worker.engines import RankGroup
from worker.engines.connecting import connect
from worker.executor.messages import (
    Build,
    Built,
    Dismissed,
    FromLeader,
    GroupError,
    GroupThread,
    Hello,
    Join,
    Joined,
    Leave,
    Left,
    RankFailed,
    describe,
)
from worker.executor.rank import Plan, Rank
from worker.executor.rpc import SEND_S, RpcAnswer, RpcCall, hang_up, make_queue, meet, unname

log = logging.getLogger("tokenyard.worker.group")

DISMISS_S: Final = 120.0  # until the leader dismisses a rank that failed to load


def follow(group: RankGroup) -> None:
    """See `worker.executor.attend`."""
    link = FollowerLink(group)
    try:
        link.connect()
        plan: Plan = pickle.loads(link.hear(Build).packed)  # noqa: S301  # from our leader
        follower = _Follower(link, plan, group.rank)
        try:
            follower.serve()
        finally:
            follower.leave()
    except Dismissed as reason:
        log.info("rank %d of the group: %s", group.rank, reason)
        link.say(Left())
    finally:
        link.close()


class _Follower:
    """Runs the calls of one leader."""

    def __init__(self, link: FollowerLink, plan: Plan, rank: int) -> None:
        self._link = link
        self._plan = plan
        self._number = rank
        os.environ.update(plan.environment)
        self._rank = Rank(plan, rank)
        self._calls: Any = None  # queues; not all their methods have types
        self._answers: Any = None

    def serve(self) -> NoReturn:
        """Load, then run the leader's calls; ends by `Dismissed` or another exception."""
        try:
            self._rank.build()
            self._link.say(Built())
        except Exception as error:  # noqa: BLE001  # the leader raises it
            self._report(error)
        self._link.hear(Join)
        self._link.watch(self._wake)
        try:
            self._join()
        except Exception as error:  # noqa: BLE001  # the leader raises it
            self._report(error)
            self._link.await_end(DISMISS_S)
        while True:
            self._serve_call()

    def leave(self) -> None:
        """Unload the model."""
        self._rank.leave()
        self._link.unwatch()
        for queue in filter(None, (self._calls, self._answers)):
            hang_up(queue)
        self._calls = self._answers = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _join(self) -> None:
        self._rank.meet()
        self._rank.load()
        stages = self._plan.config.parallel_config.pipeline_parallel_size
        calls = MessageQueue.create_from_handle(self._plan.calls, self._number)
        answers = make_queue([0], stages)
        self._link.say(Joined(answers.export_handle()))
        meet(calls)
        meet(answers)
        unname(answers)
        self._calls, self._answers = calls, answers

    def _wake(self) -> None:
        """Interrupt the wait for a call; called by the reading thread."""
        if self._calls is not None:
            self._calls.shutdown()

    def _serve_call(self) -> None:
        self._link.check()
        try:
            call: RpcCall = self._calls.dequeue(indefinite=True)
        except RuntimeError:
            self._link.check()
            raise
        try:
            output = self._rank.run(call.method, call.args, call.kwargs)
            if call.wants_answer_of(self._number):
                self._answer(RpcAnswer(call.number, _in_hand(output)))
        except Exception as error:
            log.exception("rank %d of the group: %s", self._number, call.method)
            if call.wants_answer_of(self._number):
                self._answer(RpcAnswer(call.number, error=describe(error)))
            else:
                self._link.say(RankFailed(describe(error)))

    def _answer(self, answer: RpcAnswer) -> None:
        self._answers.enqueue(answer, timeout=SEND_S)

    def _report(self, error: Exception) -> None:
        log.error("rank %d of the group cannot load", self._number, exc_info=error)
        self._link.say(RankFailed(describe(error)))


def _in_hand(output: Any) -> Any:
    """The output in a form that can be pickled."""
    return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


# A follower's connection to its leader.

CONNECT_S = 120.0  # until the leader listens
MESSAGE_S = 1800.0  # until the leader's next message; its death is noticed immediately
STUCK_S = 30.0  # inside vLLM after the group has ended

Expected = TypeVar("Expected", Build, Join)


class FollowerLink:
    """The connection, and a thread that waits for the end of the group."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._line: Connection | None = None
        self._end: FromLeader | None = None  # the leader's last message; None: it has died
        self._ended = threading.Event()
        self._finished = threading.Event()
        self._wake: Callable[[], None] | None = None
        self._thread: GroupThread | None = None

    def connect(self) -> None:
        """Connect to the leader.

        Raises `GroupError` if it does not accept in time, `Dismissed` if it closes the connection.
        """
        key = multiprocessing.current_process().authkey
        try:
            line = self._line = connect(self._group.address, CONNECT_S)
            if not line.poll(MESSAGE_S):
                raise GroupError(f"the leader did not accept within {MESSAGE_S:g} s")
            answer_challenge(line, key)
            deliver_challenge(line, key)
            line.send(Hello(self._group.rank))
        except TimeoutError as error:
            raise GroupError(f"nobody leads the group at {self._group.address}") from error
        except (EOFError, ConnectionError) as error:
            raise Dismissed("the leader no longer listens") from error

    def say(self, message: Built | Joined | Left | RankFailed) -> None:
        """Send a message to the leader if it is still connected."""
        with contextlib.suppress(OSError):
            self._opened.send(message)

    def hear(self, kind: type[Expected]) -> Expected:
        """The leader's next message. Raises `Dismissed`, or `GroupError` if it died."""
        if not self._opened.poll(MESSAGE_S):
            raise GroupError(f"the leader sent nothing for {MESSAGE_S:g} s")
        message = self._receive()
        if isinstance(message, kind):
            return message
        raise _ending(message)

    def watch(self, wake: Callable[[], None]) -> None:
        """Start a thread that calls ``wake`` when the group ends."""
        self._wake = wake
        self._thread = GroupThread(self._listen)

    def await_end(self, timeout_s: float) -> None:
        """Wait until the group ends; raises like `check`."""
        clock.wait(self._ended, timeout_s)
        self.check()
        raise GroupError(f"the leader did not dismiss this rank within {timeout_s:g} s")

    def check(self) -> None:
        """Raise `Dismissed`, or `GroupError` if the leader died."""
        if self._ended.is_set():
            raise _ending(self._end)

    def unwatch(self) -> None:
        """Stop the thread, because nothing waits for other ranks any more; idempotent."""
        self._finished.set()
        if self._thread is not None:
            self._thread.stop()
        self._wake = None

    def close(self) -> None:
        """Close the connection; idempotent."""
        self.unwatch()
        if self._line is not None:
            self._line.close()

    @property
    def _opened(self) -> Connection:
        if self._line is None:
            raise GroupError("not connected to the leader")
        return self._line

    def _receive(self) -> FromLeader | None:
        """The leader's next message; None where it has died."""
        message: FromLeader | None = None
        with contextlib.suppress(EOFError, OSError):
            message = self._opened.recv()
        return message

    def _listen(self, wakeup: Connection) -> None:
        if wakeup in wait([self._opened, wakeup]):
            return
        self._end = self._receive()
        self._ended.set()
        if self._wake is not None:
            self._wake()
        # As in the leader: a collective may wait for a dead rank forever.
        if not clock.wait(self._finished, STUCK_S):
            raise GroupError(f"still inside vLLM {STUCK_S:g} s after the group has ended")


def _ending(message: FromLeader | None) -> Dismissed | GroupError:
    match message:
        case Leave():
            return Dismissed("the leader dismissed this rank")
        case None:
            return GroupError("the leader of the group has died")
        case _:
            return GroupError(f"unexpected message of the leader: {message}")
