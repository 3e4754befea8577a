"""Commands to a process: drain and stop, and what its death answers."""

from __future__ import annotations

from tests.support.pools import MEMORY, A
from tests.unit.worker.commander import Commander
from worker.host.process_state import State
from worker.messages import (
    Done,
    Drain,
    Drained,
    SetEpoch,
    Warm,
)


class TestEnd:
    def test_a_drain_is_done_when_the_process_has_ended(self, host: Commander) -> None:
        # Given a process with a model, and a spare of its device
        host.load(A)
        entry = host.command("drain")
        assert host.told("w-0") == [Drain()]
        assert entry not in host.acks

        host.say("w-0", Drained())
        host.played.turn()

        # I expect it to end without a successor, and its device to be closed with all processes,
        assert host.done(entry)
        assert {host.played.member(name).state for name in ("w-0", "w-2")} == {State.STOPPED}
        host.played.turn()
        assert host.played.member("w-0").process is None

        # and the other devices to stay.
        assert host.played.member("w-1").state is State.WARM
        assert not host.played.pool.is_closed
        assert "closed for good" in host.reason(host.command("load", "w-1", model="a", devices=[0]))

    def test_a_stop_waits_for_nothing(self, host: Commander) -> None:
        host.load(A)
        entry = host.command("stop")
        host.played.turn()

        assert host.done(entry)
        assert host.played.member("w-0").state is State.STOPPED

    def test_an_end_reaches_a_process_that_has_become_another_incarnation(
        self, host: Commander
    ) -> None:
        # Given a process that leaves and joins again while a command for it is on its way
        host.load(A)
        host.played.member("w-0").set_worker("w-0.7")

        # If the command is to end it, I expect it to end.
        drain = host.command("drain")
        assert host.told("w-0") == [Drain()]
        host.say("w-0", Drained())
        host.played.turn()
        assert host.done(drain)

    def test_no_other_command_reaches_another_incarnation(self, host: Commander) -> None:
        host.load(A)
        host.played.member("w-0").set_worker("w-0.7")

        for verb in ("load", "unload", "sleep"):
            assert host.command(verb, model="b") not in host.acks
        assert host.told("w-0") == []

    def test_an_end_does_not_reach_the_next_process(self, host: Commander) -> None:
        # Given a process that has died, and its successor
        host.played.process("w-1").kill()
        host.played.turn()
        assert not host.played.member("w-1").former

        # I expect a command for the first not to end the second.
        assert host.command("drain", "w-1") not in host.acks
        assert host.played.member("w-1").state is not State.STOPPED

    def test_a_spare_ends_alone(self, host: Commander) -> None:
        host.load(A)

        assert host.done(host.command("drain", "w-2"))

        assert host.played.member("w-2").state is State.STOPPED
        assert host.played.member("w-0").state is State.READY
        assert host.played.pool.closed == set()

    def test_all_devices_may_be_closed(self, host: Commander) -> None:
        host.load(A)
        for name in ("w-0", "w-1"):
            host.command("stop", name)
        host.played.turn()

        assert host.played.pool.is_closed


def test_a_death_answers_all_commands_of_the_process(host: Commander) -> None:
    host.load(A)
    unload, drain = host.command("unload"), host.command("drain")

    host.played.process("w-0").kill()
    host.played.turn()

    assert host.reason(unload) == "the process died: ended by SIGKILL"
    assert host.done(drain)


def test_another_process_answers_no_command(host: Commander) -> None:
    host.load(A)
    entry = host.command("unload")

    host.say("w-1", Warm(MEMORY, {}), Done(SetEpoch(1)))
    host.played.process("w-1").kill()
    host.played.turn()

    assert entry not in host.acks
