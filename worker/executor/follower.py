"""A follower of a group: a warm process that runs the calls of a leader."""

from __future__ import annotations

import gc
import logging
import os
import pickle
from typing import Any, Final, NoReturn

import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.outputs import AsyncModelRunnerOutput

from worker.engines import RankGroup
from worker.executor.follower_link import FollowerLink
from worker.executor.messages import (
    Build,
    Built,
    Dismissed,
    Join,
    Joined,
    Left,
    RankFailed,
    describe,
)
from worker.executor.rank import Plan, Rank
from worker.executor.rpc import SEND_S, RpcAnswer, RpcCall, hang_up, make_queue, meet
from worker.executor.shared_memory import unname

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
