"""A program's own engines: groups, other sizes, sleep, and processes that keep memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from tests.integration.local_pool import LONG, PAIR, SIM, START_S, Start, kill, pid_of, states
from tests.support.waiting import eventually
from tokenyard.protocol.errors import EngineLost, InvalidRequest, LoadFailed, NoFreeDevice
from tokenyard.protocol.replies import Result
from worker import WorkerController
from worker.engines import Unsupported
from worker.engines.simulated.backend import CLINGING, LEAKY
from worker.engines.simulated.engine import BROKEN
from worker.host.leak import READINGS


class TestGroups:
    def test_a_group_takes_several_devices_and_returns_them(self, start: Start) -> None:
        controller = start(slots=3)
        controller.wait_warm()
        pids = [one.pid for one in controller.status()]

        engine = controller.create(PAIR)
        assert states(controller) == [("ready", "pair"), ("attached", "pair"), ("warm", "")]
        assert engine.generate("a")[0].ok
        with pytest.raises(Unsupported, match="several devices cannot sleep"):
            engine.sleep()
        controller.delete(engine)

        assert [(one.state, one.pid) for one in controller.status()] == [
            ("warm", pid) for pid in pids
        ]

    def test_a_group_ends_with_any_of_its_processes_and_returns(self, start: Start) -> None:
        controller = start(slots=2, simulated_step_s=0.005)
        engine = controller.create(PAIR)
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)
        (follower,) = (one.pid for one in controller.status() if one.state == "attached")

        kill(follower)

        with pytest.raises(EngineLost):
            list(pieces)
        assert engine.generate("a", max_tokens=3)[0].ok
        assert sorted(states(controller)) == [("attached", "pair"), ("ready", "pair")]


class TestResizing:
    """An engine gets free processes, and returns them."""

    def test_an_engine_grows_and_shrinks_and_grows_again(self, start: Start) -> None:
        # Given an engine on one of three devices
        controller = start(slots=3)
        controller.wait_warm()
        pids = [one.pid for one in controller.status()]
        engine = controller.create(SIM)
        before = engine.generate("abc", max_tokens=20)[0].tokens

        # If it gets another device, returns it, and gets it again
        for size, others in ((2, ["attached"]), (1, ["warm"]), (2, ["attached"])):
            engine.resize(tensor_parallel_size=size)

            # I expect it in the same processes, with the same answers.
            assert engine.devices == tuple(range(size))
            found = [one.state for one in controller.status()]
            eventually(lambda: [one.state for one in controller.status()][1:2] == others)  # noqa: B023
            assert found[0] == "ready"
            assert found[2] == "warm"
            assert engine.generate("abc", max_tokens=20)[0].tokens == before
        assert [one.pid for one in controller.status()] == pids
        engine.close()
        eventually(lambda: states(controller) == [("warm", "")] * 3)

    @pytest.mark.long
    def test_running_requests_finish_and_new_ones_wait(self, start: Start) -> None:
        # Given a running stream, many requests that wait for a place, and a long load
        controller = start(slots=2, simulated_step_s=0.005, simulated_load_s=2.0)
        engine = controller.create(replace(SIM, max_num_seqs=2))
        alone = [engine.generate(f"p{n}", max_tokens=9)[0].tokens for n in range(8)]
        pieces = engine.stream("stream", max_tokens=300)
        first = next(pieces)

        with ThreadPoolExecutor(10) as pool:
            waiting = [pool.submit(engine.generate, f"p{n}", max_tokens=9) for n in range(4)]
            resized = pool.submit(engine.resize, tensor_parallel_size=2)
            eventually(lambda: controller.status()[0].state == "draining")
            late = [pool.submit(engine.generate, f"p{n}", max_tokens=9) for n in range(4, 8)]
            *rest, result = pieces
            early = [one.done() for one in late]
            resized.result(START_S)
            together = [future.result(START_S)[0].tokens for future in [*waiting, *late]]

        # I expect each to get its complete answer once, the late ones from the new size.
        assert together == alone
        assert not any(early)
        assert isinstance(result, Result)
        tokens = [token for one in [first, *rest] for token in one.tokens]
        assert tokens == result.tokens
        assert len(tokens) == 300
        assert engine.devices == (0, 1)

    def test_requests_that_do_not_finish_in_time_fail(self, start: Start) -> None:
        controller = start(slots=2, simulated_step_s=0.01, drain_timeout_s=0.2)
        engine = controller.create(SIM)
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)

        engine.resize(tensor_parallel_size=2)

        with pytest.raises(EngineLost, match="it had to go before it was done"):
            list(pieces)
        assert engine.generate("a", max_tokens=3)[0].ok

    def test_a_process_that_dies_during_a_resize_is_replaced(self, start: Start) -> None:
        # Given an engine that finishes a long stream before it is resized
        controller = start(slots=2, simulated_step_s=0.01)
        engine = controller.create(SIM)
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)
        pid = pid_of(controller, engine)
        with ThreadPoolExecutor(1) as pool:
            resized = pool.submit(engine.resize, tensor_parallel_size=2)
            eventually(lambda: controller.status()[0].state == "draining")
            kill(pid)

            # I expect its reader to get an error, and the engine to return in the new size.
            with pytest.raises(EngineLost, match="its process died"):
                list(pieces)
            resized.result(START_S)
        assert engine.devices == (0, 1)
        assert engine.generate("a", max_tokens=3)[0].ok

    def test_a_full_pool_names_its_engines(self, start: Start) -> None:
        controller = start(slots=2)
        engine, other = controller.create(SIM), controller.create(replace(SIM, name="other"))

        with pytest.raises(
            NoFreeDevice, match=r"sim takes 1 more, 0 free: .*device \d holds other"
        ):
            engine.resize(tensor_parallel_size=2)
        assert engine.generate("a")[0].ok

        other.close()
        engine.resize(tensor_parallel_size=2)
        assert sorted(engine.devices) == [0, 1]  # its own device stays first

    def test_returned_devices_serve_other_engines(self, start: Start) -> None:
        controller = start(slots=2)
        engine = controller.create(PAIR)

        engine.resize(tensor_parallel_size=1)

        assert controller.create(replace(SIM, name="other")).devices == (1,)
        assert engine.generate("a")[0].ok

    def test_a_size_that_cannot_be_loaded_leaves_the_engine_unchanged(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given an engine whose model cannot be split
        controller = start(slots=2)
        engine = controller.create(SIM)
        broken = replace(engine._booking.spec, path=BROKEN, tensor_parallel_size=2)

        order = partial(engine._pool.bookings.resize, engine._booking, broken)
        with pytest.raises(LoadFailed, match="broken model"):
            engine._pool.carry_out(order, engine._booking, "resized", START_S)

        assert engine.generate("a")[0].ok
        assert engine.devices == (0,)
        eventually(lambda: states(controller) == [("ready", "sim"), ("warm", "")])

    @pytest.mark.parametrize("how", ["sleep", "close"])
    def test_a_sleeping_or_deleted_engine_cannot_be_resized(self, start: Start, how: str) -> None:
        engine = start(slots=2).create(SIM)
        getattr(engine, how)()

        with pytest.raises(RuntimeError, match=r"sleeps|deleted"):
            engine.resize(tensor_parallel_size=2)

    def test_an_engine_that_would_sleep_leaves_nothing_behind(self, start: Start) -> None:
        # Given a model that sleeps when it gives way
        controller = start(slots=2, sleepers=1)
        controller.wait_warm()
        engine = controller.create(replace(SIM, sleep_level=1))

        engine.resize(tensor_parallel_size=2)

        assert engine.generate("a")[0].ok
        eventually(lambda: "asleep" not in {one.state for one in controller.status()})

    def test_an_invalid_size_is_refused(self, start: Start) -> None:
        engine = start().create(SIM)

        with pytest.raises(InvalidRequest, match="Expected `int` >= 1"):
            engine.resize(tensor_parallel_size=0)
        engine.resize()
        assert engine.generate("a")[0].ok


class TestSleeping:
    def test_a_sleeper_makes_room_and_returns(self, start: Start) -> None:
        # Given a sleeping engine, and another on its device
        controller = start(sleepers=1)
        controller.wait_warm()
        first = controller.create(replace(SIM, name="first"))
        pid = pid_of(controller, first)
        first.sleep()
        second = controller.create(replace(SIM, name="second"))
        assert sorted(states(controller)) == [("asleep", "first"), ("ready", "second")]
        with pytest.raises(RuntimeError, match="first sleeps; wake it first"):
            first.generate("a")

        # If it is woken, I expect an error that names the other engine,
        with pytest.raises(NoFreeDevice, match="device 0 holds second"):
            first.wake()
        # and the engine in its old process once there is room.
        second.sleep()
        first.wake()
        assert set(first.phases_s) == {"wake"}
        assert pid_of(controller, first) == pid
        assert first.generate("a")[0].ok

    def test_a_sleeper_that_died_is_loaded(self, start: Start) -> None:
        controller = start()
        engine = controller.create(SIM)
        pid = pid_of(controller, engine)
        engine.sleep()

        kill(pid)
        eventually(lambda: controller.status()[0].pid != pid)
        engine.wake()

        assert set(engine.phases_s) == {"weights"}
        assert engine.generate("a")[0].ok

    def test_a_sleeper_whose_process_is_needed_is_loaded(self, start: Start) -> None:
        controller = start()
        engine = controller.create(SIM)
        engine.sleep()

        controller.create(replace(SIM, name="other")).close()
        engine.wake()

        assert engine.generate("a")[0].ok

    def test_a_sleeper_can_be_deleted(self, start: Start) -> None:
        controller = start()
        engine = controller.create(SIM)
        engine.sleep()

        engine.close()

        assert states(controller) == [("warm", "")]

    def test_an_unknown_level_is_refused(self, start: Start) -> None:
        engine = start().create(SIM)

        with pytest.raises(InvalidRequest, match="level: use one of 1, 2"):
            engine.sleep(level=3)
        assert engine.generate("a")[0].ok

    def test_an_engine_that_cannot_sleep_is_unloaded(self, start: Start) -> None:
        # Given an engine that refuses, like those on devices without sleep
        controller = start()
        engine = controller.create(SIM)
        order = partial(engine._pool.bookings.put_to_sleep, engine._booking, 7)
        engine._pool.carry_out(order, engine._booking, "asleep", START_S)

        assert states(controller) == [("warm", "")]
        engine.wake()
        assert engine.generate("a")[0].ok


def pids_of(controller: WorkerController, path: str, cycles: int) -> list[int]:
    """The process id after each of this many models has come and gone."""
    found = []
    for _ in range(cycles):
        controller.delete(controller.create(replace(SIM, path=path)))
        controller.wait_warm()
        found.append(controller.status()[0].pid)
    return found


class TestLeaks:
    def test_a_process_that_keeps_nothing_stays(self, start: Start) -> None:
        assert len(set(pids_of(start(), "nowhere", 3 * READINGS))) == 1

    def test_a_process_that_grows_with_each_model_is_replaced_after_a_few(
        self, start: Start
    ) -> None:
        pids = pids_of(start(), LEAKY, 2 * READINGS)

        # It may already be gone at this point, or just about to go.
        assert len(set(pids[: READINGS - 1])) == 1
        assert pids[READINGS] != pids[0]
        assert 2 <= len(set(pids)) <= 3

    @pytest.mark.long
    def test_a_process_that_keeps_a_whole_model_is_replaced_immediately(self, start: Start) -> None:
        pids = pids_of(start(), CLINGING, 4)

        assert len(set(pids)) >= 3

    def test_operators_may_allow_more(self, start: Start) -> None:
        controller = start(leak_floor_mib=10_000.0)

        assert len(set(pids_of(controller, LEAKY, 2 * READINGS))) == 1
