"""Commands about models: their effects on the pool, and when they are acknowledged."""

from __future__ import annotations

import pytest

from tests.support.pools import MEMORY, PAIR, A, B, engine_info, theatre
from tests.unit.worker.commander import Commander
from tokenyard.protocol.control import Acknowledgement, Command
from worker.host.process_state import State
from worker.messages import (
    Asleep,
    CommandRefused,
    Drain,
    Drained,
    LoadModel,
    Ready,
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

    def test_a_load_swaps_the_model(self, host: Commander) -> None:
        host.load(A)
        entry = host.command("load", model="b")
        host.say("w-0", Drained(), Warm(MEMORY, {}))
        assert entry not in host.acks

        host.say("w-0", Ready(engine_info(B), MEMORY))

        assert host.told("w-0") == [Drain(), Unload(), LoadModel(B)]
        assert host.done(entry)

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

    def test_a_model_that_cannot_be_loaded_fails_the_command(self, host: Commander) -> None:
        entry = host.command("load", model="a")

        host.say("w-0", CommandRefused("a: no such file"))

        assert host.reason(entry) == "a: no such file"

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

    def test_named_devices_form_the_group(self, host: Commander) -> None:
        entry = host.command("load", model="pair", devices=[0, 1])
        host.say("w-0", Ready(engine_info(PAIR), MEMORY))

        assert host.done(entry)
        assert host.played.member("w-1").state is State.ATTACHED

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
    def test_an_unload_is_done_when_the_process_is_warm(self, host: Commander) -> None:
        host.load(A)
        entry = host.command("unload")
        host.say("w-0", Drained())
        assert host.told("w-0") == [Drain(), Unload()]
        assert entry not in host.acks

        host.say("w-0", Warm(MEMORY, {}))

        assert host.done(entry)

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
