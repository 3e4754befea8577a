"""The pool when loads fail, and when processes die, hang or leak."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.pools import MEMORY, A, B, Theatre, engine_info
from worker.engines import Memory
from worker.host.allocation import Replace
from worker.host.leak import READINGS
from worker.messages import CommandRefused, Drain, Drained, Heartbeat, LoadModel, Ready, Warm

MIB = 1024**2


def refuse(one: Theatre) -> None:
    """Let the load of the device fail, and the next process become warm."""
    holder = one.pool.holder(0)
    assert holder
    one.say(holder.name, CommandRefused("no such file"))
    one.turn()
    one.say(holder.name, Warm(MEMORY, {}))


class TestFailedLoads:
    def test_a_failed_load_is_tried_again_after_growing_pauses(self, one: Theatre) -> None:
        # Given an owner with only this model
        one.owner.goes_on_trying = True
        one.aim(A, 0)
        pauses = []
        for _ in range(3):
            refuse(one)
            assert one.pool.holder(0) is None, "not at once"
            pauses.append(one.pool._retries._retry_at[0] - time.monotonic())
            one.pool._retries._retry_at[0] = 0.0
            one.turn()

        assert pauses[0] > 400.0
        assert pauses[1] > 1.5 * pauses[0]
        assert pauses[2] > 1.5 * pauses[1]

    def test_a_success_resets_the_pause(self, one: Theatre) -> None:
        one.owner.goes_on_trying = True
        one.aim(A, 0)
        for _ in range(3):
            refuse(one)
            one.pool._retries._retry_at[0] = 0.0
            one.turn()
        holder = one.pool.holder(0)
        assert holder
        one.say(holder.name, Ready(engine_info(A), MEMORY))
        one.process(holder.name).end(1)
        one.turn()
        refuse(one)

        assert one.pool._retries._retry_at[0] - time.monotonic() < 2 * one.settings.backoff_s + 1

    def test_a_process_that_crashes_during_a_load_counts_against_the_model(
        self, one: Theatre
    ) -> None:
        one.aim(A, 0)

        one.process("w-0").end(-signal.SIGSEGV)

        died, failed = one.turn()
        assert died == ("died", "w-0", "crashed", "ended by SIGSEGV")
        assert failed[:2] == ("failed", "a")
        assert "SIGSEGV" in failed[2]
        assert one.pool.goals == {0: None}

    def test_a_killed_process_does_not_count_against_the_model(self, one: Theatre) -> None:
        # Given an owner with only this model
        one.owner.goes_on_trying = True
        one.aim(A, 0)

        one.process("w-0").kill()

        died, lost = one.turn()
        assert died == ("died", "w-0", "lost", "ended by SIGKILL")
        assert lost[:2] == ("lost", "a")
        assert one.heard("w-1") == [LoadModel(A)], "the spare does it instead, without a pause"

    def test_a_load_that_was_killed_is_begun_again_by_order_only(self, one: Theatre) -> None:
        one.aim(A, 0)

        one.process("w-0").kill()
        one.turn()

        assert one.pool.goals == {0: None}
        assert one.heard("w-1") == [], "perhaps nobody wants it any more"

    def test_a_load_over_its_limit_counts_against_the_model(self, one: Theatre) -> None:
        one.aim(A, 0)
        one.member("w-0")._entered -= 7201.0

        _, failed = one.turn()

        assert failed[:2] == ("failed", "a")
        assert "still loading after 7201 s (load_timeout_s)" in failed[2]
        assert one.pool.goals == {0: None}

    @pytest.mark.parametrize("how", ["refuses", "crashes"])
    def test_a_failed_load_does_not_count_against_another_model(
        self, one: Theatre, how: str
    ) -> None:
        # Given a device whose goal changes during a load
        one.aim(A, 0)
        goal = one.pool.aim(B, [0])
        one.turn()

        # If that load fails
        if how == "refuses":
            told = one.say("w-0", CommandRefused("a: no such file"))
        else:
            one.process("w-0").end(-signal.SIGSEGV)
            told = one.turn()

        # I expect the new goal to stay and to be loaded.
        assert "failed" not in {name for name, *_ in told}
        assert one.pool.goals == {0: goal}
        holder = one.pool.holder(0)
        assert one.heard(holder.name)[-1] == LoadModel(B)


class TestDeath:
    def test_a_process_that_hangs_is_killed(self, one: Theatre) -> None:
        one.hold(A, 0)
        one.say("w-0", Heartbeat(1, 2))
        one.member("w-0")._moved -= 61.0

        ((_, name, why, reason),) = one.turn()
        assert (name, why) == ("w-0", "crashed")
        assert "no progress" in reason

    def test_a_host_that_was_suspended_kills_no_process(self, one: Theatre) -> None:
        one.hold(A, 0)
        one.say("w-0", Heartbeat(1, 2))
        for member in one.pool.members:
            member._moved -= 1000.0
        one.pool._watched_at -= 1000.0

        one.turn()

        assert one.process("w-0").exitcode is None


class TestReplacing:
    def test_a_leaking_process_is_replaced(self, one: Theatre) -> None:
        told = []
        for at in range(1, READINGS + 1):
            told += one.say("w-1", Warm(Memory(host=1000 + at * 16 * MIB), {"unload": 0.1}))
        told += one.turn()

        assert told == [("died", "w-1", "left", "ended by SIGKILL: replaced")]
        assert one.member("w-1").start_at <= time.monotonic()

    def test_a_leak_is_reported_once(self, one: Theatre, caplog: pytest.LogCaptureFixture) -> None:
        member = one.member("w-1")
        member.warm(Warm(Memory(host=1000 + 96 * MIB), {"unload": 0.1}))

        for _ in range(3):  # its end is noticed with a delay
            one.pool._carry_out(Replace(member))

        assert [record.message for record in caplog.records if "leaks" in record.message] == [
            "w-1 leaks: 96 MiB of unloaded models; replaced"
        ]

    def test_a_process_that_was_told_to_end_finishes_first(self, one: Theatre) -> None:
        holder = one.hold(A, 0)
        one.pool.recycle(holder)
        one.turn()
        assert one.heard("w-0") == [Drain()]

        told = one.say("w-0", Drained()) + one.turn()

        assert told == [("died", "w-0", "left", "ended by SIGKILL: replaced")]
        assert one.heard("w-1") == [LoadModel(A)], "the spare goes on with it"

    def test_a_process_that_says_it_is_worn_finishes_first(self, one: Theatre) -> None:
        one.hold(A, 0)
        for _ in range(2):
            one.say("w-0", Heartbeat(1, 0, is_worn=True))

        assert one.heard("w-0") == [Drain()]
