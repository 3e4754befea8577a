"""The pool when models cannot be loaded, and when processes die, hang or leak."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.pools import MEMORY, Theatre, engine_info, theatre
from worker.engines import Memory
from worker.host.allocation import Replace
from worker.host.leak import READINGS
from worker.host.process_state import State
from worker.messages import (
    CommandRefused,
    Drain,
    Drained,
    Heartbeat,
    LoadModel,
    ProcessFailed,
    Ready,
    Warm,
)
from worker.models import ModelSpec

MIB = 1024**2
A = ModelSpec(name="a", path="models/a")
B = ModelSpec(name="b", path="models/b")


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Theatre]:
    """One device with a spare."""
    with theatre(monkeypatch, spares=1, drain_timeout_s=60.0) as played:
        played.warm_up()
        yield played


class TestFailedLoads:
    def test_the_goal_goes_where_the_owner_gives_it_up(self, one: Theatre) -> None:
        goal = one.pool.aim(A, [0])
        one.turn()

        told = one.say("w-0", CommandRefused("a: no such file"))

        assert told == [("failed", "a", "a: no such file")]
        assert goal
        assert one.pool.goals == {0: None}
        assert one.member("w-0").state is State.WARM
        assert one.heard("w-0") == [LoadModel(A)], "once"

    def test_it_is_tried_again_after_growing_pauses(self, one: Theatre) -> None:
        # Given an owner that has only this model
        one.owner.goes_on_trying = True
        one.pool.aim(A, [0])
        one.turn()
        pauses = []
        for _ in range(3):
            one.say("w-0", CommandRefused("no such file"))
            assert one.heard("w-0") == [LoadModel(A)]
            one.turn()
            assert one.heard("w-0") == [], "not at once"
            pauses.append(one.pool._retry_at[0] - time.monotonic())
            one.pool._retry_at[0] = 0.0
            one.turn()

        assert pauses[0] > 4.0
        assert pauses[1] > 1.5 * pauses[0]
        assert pauses[2] > 1.5 * pauses[1]

    def test_success_ends_the_growth(self, one: Theatre) -> None:
        one.owner.goes_on_trying = True
        one.pool.aim(A, [0])
        one.turn()
        for _ in range(3):
            one.say("w-0", CommandRefused("no such file"))
            one.pool._retry_at[0] = 0.0
            one.turn()
        one.say("w-0", Ready(engine_info(A), MEMORY))
        one.process("w-0").end(1)
        one.turn()
        one.say("w-1", CommandRefused("no such file"))

        assert one.pool._retry_at[0] - time.monotonic() < 2 * one.settings.backoff_s + 1

    def test_a_process_that_crashes_while_it_loads(self, one: Theatre) -> None:
        one.pool.aim(A, [0])
        one.turn()

        one.process("w-0").end(-signal.SIGSEGV)

        died, failed = one.turn()
        assert died == ("died", "w-0", "crashed", "ended by SIGSEGV")
        assert failed[:2] == ("failed", "a")
        assert "SIGSEGV" in failed[2]
        assert one.pool.goals == {0: None}

    def test_one_that_was_killed_says_nothing_of_the_model(self, one: Theatre) -> None:
        one.pool.aim(A, [0])
        one.turn()

        one.process("w-0").kill()

        assert one.turn() == [("died", "w-0", "lost", "ended by SIGKILL")]
        assert one.heard("w-1") == [LoadModel(A)], "the spare does it instead"

    @pytest.mark.parametrize("how", ["refuses", "crashes"])
    def test_a_model_pays_for_no_other(self, one: Theatre, how: str) -> None:
        # Given a device whose goal has changed while it loads
        one.pool.aim(A, [0])
        one.turn()
        goal = one.pool.aim(B, [0])
        one.turn()

        # If what it loads still cannot be loaded
        if how == "refuses":
            told = one.say("w-0", CommandRefused("a: no such file"))
        else:
            one.process("w-0").end(-signal.SIGSEGV)
            told = one.turn()

        # I expect the new goal to stand and to be loaded.
        assert "failed" not in {name for name, *_ in told}
        assert one.pool.goals == {0: goal}
        holder = one.pool.holder(0)
        assert holder
        assert one.heard(holder.name)[-1] == LoadModel(B)


class TestDeath:
    def test_a_spare_takes_over(self, one: Theatre) -> None:
        one.hold(A, 0)

        one.process("w-0").kill()

        assert one.turn() == [("died", "w-0", "lost", "ended by SIGKILL")]
        assert one.heard("w-1") == [LoadModel(A)]
        assert one.member("w-0").state is State.DOWN
        assert one.member("w-0").start_at > time.monotonic()

    def test_the_dead_one_is_the_next_spare(self, one: Theatre) -> None:
        one.hold(A, 0)
        one.process("w-0").kill()
        one.turn()
        one.member("w-0").start_at = 0.0
        one.turn()

        assert one.say("w-0", Warm(MEMORY, {})) == []
        assert one.member("w-0").state is State.WARM
        assert one.heard("w-0") == []

    def test_what_it_said_of_its_end(self, one: Theatre) -> None:
        one.process("w-0").say(ProcessFailed("RuntimeError: CUDA"))
        one.process("w-0").end(1)

        assert one.turn() == [("died", "w-0", "crashed", "exit status 1: RuntimeError: CUDA")]

    def test_one_that_hangs_is_killed(self, one: Theatre) -> None:
        one.hold(A, 0)
        one.say("w-0", Heartbeat(1, 2))
        one.member("w-0")._moved -= 61.0

        ((_, name, why, reason),) = one.turn()
        assert (name, why) == ("w-0", "crashed")
        assert "no progress" in reason

    def test_a_host_that_was_suspended_finds_nobody_hanging(self, one: Theatre) -> None:
        one.hold(A, 0)
        one.say("w-0", Heartbeat(1, 2))
        for member in one.pool.members:
            member._moved -= 1000.0
        one.pool._looked_at -= 1000.0

        one.turn()

        assert one.process("w-0").exitcode is None


class TestReplacing:
    def test_a_leak_costs_a_process_its_place(self, one: Theatre) -> None:
        told = []
        for at in range(1, READINGS + 1):
            told += one.say("w-1", Warm(Memory(host=1000 + at * 16 * MIB), {"unload": 0.1}))
        told += one.turn()

        assert told == [("died", "w-1", "left", "ended by SIGKILL: replaced")]
        assert one.member("w-1").start_at <= time.monotonic()

    def test_a_leak_is_told_once(self, one: Theatre, caplog: pytest.LogCaptureFixture) -> None:
        member = one.member("w-1")
        member.warm(Warm(Memory(host=1000 + 96 * MIB), {"unload": 0.1}))

        for _ in range(3):  # its end takes a while to be noticed
            one.pool._take(Replace(member))

        assert [record.message for record in caplog.records if "keeps" in record.message] == [
            "w-1 keeps 96 MiB of models that are gone: replaced"
        ]

    def test_one_that_was_told_to_end_finishes_first(self, one: Theatre) -> None:
        holder = one.hold(A, 0)
        one.pool.recycle(holder)
        one.turn()
        assert one.heard("w-0") == [Drain()]

        told = one.say("w-0", Drained()) + one.turn()

        assert told == [("died", "w-0", "left", "ended by SIGKILL: replaced")]
        assert one.heard("w-1") == [LoadModel(A)], "the spare goes on with it"
