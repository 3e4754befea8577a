"""Commands about models and processes: their effects, and when they are acknowledged."""

from __future__ import annotations

import pytest

from tests.support.pools import MEMORY, PAIR, A, B, engine_info, theatre
from tests.unit.worker.commander import Commander
from tokenyard.protocol.control import Acknowledgement, Command
from worker.host.process_state import State
from worker.messages import (
    Asleep,
    CommandRefused,
    Done,
    Drain,
    Drained,
    LoadModel,
    Ready,
    SetEpoch,
    Sleep,
    Unload,
    Wake,
    Warm,
)

SUPERSEDED = "another command came first"


def test_a_worker_of_another_host_is_ignored(host: Commander) -> None:
    entry = host.command("load", "elsewhere", model="a")

    assert entry not in host.acks
    assert set(host.played.pool.goals.values()) == {None}


class TestLoad:
    def test_a_load_is_done_when_the_engine_is_ready(self, host: Commander) -> None:
        entry = host.command("load", model="a")
        assert host.told("w-0") == [LoadModel(A)]
        assert entry not in host.acks

        host.say("w-0", Ready(engine_info(A), MEMORY))

        assert host.acks == {entry: Acknowledgement(worker="w-0.1", done=True)}

    def test_a_loaded_model_is_not_loaded_again(self, host: Commander) -> None:
        host.load(A)

        assert host.done(host.command("load", model="a"))
        assert host.told("w-0") == []

    def test_a_second_command_for_the_same_load_waits_too(self, host: Commander) -> None:
        entries = [host.command("load", model="a") for _ in range(2)]
        assert host.told("w-0") == [LoadModel(A)]
        assert not host.acks

        host.say("w-0", Ready(engine_info(A), MEMORY))

        assert all(host.done(entry) for entry in entries)

    def test_an_unlisted_model_is_refused(self, host: Commander) -> None:
        entry = host.command("load", model="evil")

        assert "'evil' is not in the models file" in host.reason(entry)
        assert host.told("w-0") == []

    def test_the_last_command_for_a_device_counts(self, host: Commander) -> None:
        # Given a device that loads one model and gets another as its goal
        first = host.command("load", model="a")
        second = host.command("load", model="b")
        assert host.reason(first) == SUPERSEDED

        # If the first is ready all the same
        host.say("w-0", Ready(engine_info(A), MEMORY))

        # I expect the second command to be done only when its own model is ready.
        assert second not in host.acks
        host.say("w-0", Drained(), Warm(MEMORY, {}), Ready(engine_info(B), MEMORY))
        assert host.done(second)

    def test_a_load_whose_process_is_killed_fails_the_command(self, host: Commander) -> None:
        entry = host.command("load", model="a")

        host.played.process("w-0").kill()
        host.played.turn()

        assert host.reason(entry) == "the process died while it loaded: ended by SIGKILL"

    def test_a_load_voids_commands_that_would_end_the_model(self, host: Commander) -> None:
        # Given a worker that shall unload its model and has not begun
        host.load(A)
        commands = [
            Command(verb="sleep", worker="w-0.1"),
            Command(verb="load", worker="w-0.1", model="a"),
        ]
        for entry, command in zip(("s", "l"), commands, strict=True):
            host.orders.run(entry, command)
        host.played.turn()

        assert host.reason("s") == SUPERSEDED
        assert host.done("l")
        assert host.told("w-0") == []
        # When its time comes, the model is unloaded as if there had been no command.
        host.command("load", model="b")
        host.say("w-0", Drained())
        assert host.told("w-0") == [Drain(), Unload()]


class TestGroups:
    def test_devices_are_chosen_by_number_if_none_are_named(self, host: Commander) -> None:
        host.command("load", "w-1", model="pair")

        goal = host.played.pool.goals[0]
        assert goal.devices == (1, 0)

    @pytest.mark.parametrize("devices", [[0], [0, 1, 2], [0, 7], [0, 0], [0, 1, 1]])
    def test_devices_that_form_no_group_are_refused(
        self, host: Commander, devices: list[int]
    ) -> None:
        entry = host.command("load", model="pair", devices=devices)

        assert host.reason(entry) == "pair takes 2 of this host's 2 devices"

    def test_a_host_that_is_too_small_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with theatre(monkeypatch, spares=1) as played:
            host = Commander(played)

            entry = host.command("load", model="pair")

            assert host.reason(entry) == "pair takes 2 of this host's 1 devices"

    def test_an_unload_of_a_follower_ends_the_group(self, host: Commander) -> None:
        host.load(PAIR)

        entry = host.command("unload", "w-1")
        host.say("w-0", Drained())
        assert host.told("w-0") == [Drain(), Unload()]
        assert entry not in host.acks
        host.say("w-1", Warm(MEMORY, {"attached": 1.0}))

        assert host.done(entry)
        assert host.played.pool.goals == {0: None, 1: None}


class TestUnload:
    def test_an_unload_of_an_empty_process_is_done(self, host: Commander) -> None:
        assert host.done(host.command("unload"))

    def test_an_unload_voids_a_load_that_has_begun(self, host: Commander) -> None:
        load = host.command("load", model="a")
        unload = host.command("unload")

        assert host.reason(load) == SUPERSEDED
        host.say("w-0", Ready(engine_info(A), MEMORY), Drained(), Warm(MEMORY, {}))
        assert host.done(unload)
        assert host.told("w-0") == [LoadModel(A), Drain(), Unload()]

    def test_a_sleeper_is_unloaded(self, host: Commander) -> None:
        host.load(A)
        host.command("sleep")
        host.say("w-0", Drained(), Asleep(0.1, MEMORY))
        host.told("w-0")

        entry = host.command("unload")

        assert host.told("w-0") == [Unload()]
        host.say("w-0", Warm(MEMORY, {}))
        assert host.done(entry)

    def test_an_unload_wins_over_a_sleep_that_has_not_begun(self, host: Commander) -> None:
        host.load(A)
        sleep = host.command("sleep")
        unload = host.command("unload")
        host.say("w-0", Drained())

        assert host.reason(sleep) == SUPERSEDED
        assert host.told("w-0") == [Drain(), Unload()]
        assert unload not in host.acks
        host.say("w-0", Warm(MEMORY, {}))
        assert host.done(unload)


class TestSleepAndWake:
    def test_a_model_sleeps_and_wakes_on_command(self, host: Commander) -> None:
        host.load(A)
        sleep = host.command("sleep", level=2)
        host.say("w-0", Drained())
        assert host.told("w-0") == [Drain(), Sleep(2)]
        assert sleep not in host.acks
        host.say("w-0", Asleep(0.1, MEMORY))
        assert host.done(sleep)

        wake = host.command("wake")
        assert host.told("w-0") == [Wake()]
        assert wake not in host.acks
        host.say("w-0", Ready(engine_info(A), MEMORY))
        assert host.done(wake)

    def test_a_repeated_sleep_or_wake_is_done_immediately(self, host: Commander) -> None:
        host.load(A)
        assert host.done(host.command("wake"))
        host.command("sleep")
        host.say("w-0", Drained(), Asleep(0.1, MEMORY))

        assert host.done(host.command("sleep"))

    def test_a_process_without_a_model_can_neither_sleep_nor_wake(self, host: Commander) -> None:
        assert "only a ready worker" in host.reason(host.command("sleep"))
        assert "it is warm" in host.reason(host.command("wake"))

    def test_a_group_cannot_sleep(self, host: Commander) -> None:
        host.load(PAIR)

        assert "of one device" in host.reason(host.command("sleep"))

    def test_a_model_that_cannot_sleep_is_unloaded(self, host: Commander) -> None:
        host.load(A)
        entry = host.command("sleep")
        host.say("w-0", Drained(), CommandRefused("no GPU, no sleep"))

        assert host.reason(entry) == "no GPU, no sleep"
        assert host.told("w-0") == [Drain(), Sleep(1), Unload()]


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
