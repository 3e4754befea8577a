"""A program's own engines, without Redis: the pool, its engines, and their failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.docs.pages import first_names, page, section
from tests.support.vllm_versions import write_distribution
from tests.support.waiting import eventually
from tokenyard.protocol.errors import (
    EngineLost,
    InvalidRequest,
    LoadFailed,
    NoFreeDevice,
    SettingsError,
    WaitTimeout,
)
from tokenyard.protocol.replies import Delta, Result
from worker import AdapterSpec, EngineHandle, ModelSpec, ProcessStatus, WorkerController
from worker.engines import Unsupported
from worker.engines.crash_points import POISON
from worker.engines.simulated.backend import BROKEN, CLINGING, LEAKY
from worker.host.leak import READINGS

ROOT = Path(__file__).parents[2]
SIM = ModelSpec("sim", "nowhere")
CHAT = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
PAIR = ModelSpec("pair", "nowhere", tensor_parallel_size=2)
LONG = 8_000  # tokens: never finished, with steps of some milliseconds
START_S = 30.0

Start = Callable[..., WorkerController]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start controllers with simulated engines, and stop them after the test."""
    started: list[WorkerController] = []

    def make(models: Any = None, **options: Any) -> WorkerController:
        defaults = {"engine": "simulated", "timeout_s": START_S, "backoff_s": 0.01, "grace_s": 0.0}
        controller = WorkerController(models, **(defaults | options))
        started.append(controller)
        controller.start()
        return controller

    yield make
    for controller in started:
        controller.stop()


def states(controller: WorkerController) -> list[tuple[str, str]]:
    return [(one.state, one.model) for one in controller.status()]


def pid_of(controller: WorkerController, engine: EngineHandle) -> int:
    ready = {one.device: one.pid for one in controller.status() if one.state == "ready"}
    return ready[engine.devices[0]]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class TestLife:
    def test_a_process_outlives_its_models(self, start: Start) -> None:
        # Given a warm process
        controller = start()
        controller.wait_warm()
        (warm,) = controller.status()
        assert (warm.state, warm.model, warm.phases_s) == ("warm", "", {"import": 0.0})

        # If two models come and go
        for name in ("first", "second"):
            with controller.create(replace(SIM, name=name, revision="r1")) as engine:
                (status,) = controller.status()
                assert (status.state, status.model, status.pid) == ("ready", name, warm.pid)
                assert (engine.model, engine.devices) == (name, (0,))
                assert (engine.info.model, engine.info.revision) == (name, "r1")
                assert set(engine.phases_s) == {"weights"}

            # I expect each to leave the same process behind, as warm as before.
            (status,) = controller.status()
            assert (status.state, status.model, status.pid) == ("warm", "", warm.pid)

    def test_create_waits_for_a_process_that_warms_up(self, start: Start) -> None:
        controller = start()

        assert controller.create(SIM).generate("a", max_tokens=1)[0].ok

    def test_a_controller_connects_nowhere(self, start: Start) -> None:
        controller = start(slots=2)
        controller.create(SIM).generate("a")

        for status in controller.status():
            assert psutil.Process(status.pid).net_connections("inet") == []

    def test_status_can_be_printed(self) -> None:
        status = ProcessStatus("local-1", 1, "ready", "sim", 7, {"weights": 0.123}, None, None, "")

        assert str(status) == "local-1    device 1  ready      sim  weights 0.12 s"

    def test_models_come_from_a_file_by_name(self, start: Start, tmp_path: Path) -> None:
        file = tmp_path / "models.toml"
        file.write_text('[models.one]\npath = "org/one"\n[models.two]\npath = "org/two"\n')
        controller = start(file)

        assert controller.create("two").info.model == "two"
        with pytest.raises(InvalidRequest, match="'three' is not listed; use one, two"):
            controller.create("three")

    def test_models_come_from_a_mapping(self, start: Start) -> None:
        assert start({"a": replace(SIM, name="a")}).create("a").model == "a"

    def test_delete_lets_running_requests_finish(self, start: Start) -> None:
        # Given a running request
        controller = start(simulated_step_s=0.01)
        engine = controller.create(SIM)
        pieces = engine.stream("a", max_tokens=30)
        next(pieces)

        # If its engine is deleted
        controller.delete(engine)

        # I expect the complete answer, and no more.
        *_, result = pieces
        assert isinstance(result, Result)
        assert len(result.tokens) == 30
        with pytest.raises(RuntimeError, match="sim was deleted"):
            engine.generate("a")
        controller.delete(engine)
        assert states(controller) == [("warm", "")]

    def test_the_wait_of_a_delete_is_bounded(self, start: Start) -> None:
        controller = start(simulated_step_s=0.05, drain_timeout_s=0.1)
        engine = controller.create(SIM)
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)

        controller.delete(engine)

        with pytest.raises(EngineLost, match="had to go"):
            list(pieces)


class TestGenerating:
    def test_results_come_in_the_order_of_the_prompts(self, start: Start) -> None:
        engine = start().create(replace(SIM, max_num_seqs=3))
        prompts = [f"prompt {number}" for number in range(20)]

        results = engine.generate(prompts, max_tokens=4)

        alone = [engine.generate(prompt, max_tokens=4)[0].text for prompt in prompts]
        assert [result.text for result in results] == alone
        assert len(set(alone)) == 20

    def test_prompts_of_all_kinds_are_answered(self, start: Start) -> None:
        engine = start().create(SIM)
        chat = [{"role": "user", "content": "a"}]

        (text,) = engine.generate("abc", max_tokens=2)
        (tokens,) = engine.generate([97, 98, 99], max_tokens=2)
        (talk,) = engine.generate(chat, max_tokens=2)
        several = engine.generate(["abc", [97, 98, 99], chat], max_tokens=2)

        assert (text.text is None, tokens.text is None) == (False, True)
        assert text.tokens == tokens.tokens
        assert [one.tokens for one in several] == [text.tokens, tokens.tokens, talk.tokens]
        assert engine.generate([]) == []

    def test_parameters_left_out_come_from_the_model(self, start: Start) -> None:
        engine = start().create(replace(SIM, sampling={"max_tokens": 3, "seed": 1}))

        (silent,), (own,) = engine.generate("a"), engine.generate("a", max_tokens=5)

        assert (len(silent.tokens), len(own.tokens)) == (3, 5)
        assert own.tokens[:3] == silent.tokens

    def test_an_adapter_is_requested_by_its_name(self, start: Start) -> None:
        engine = start().create(replace(SIM, adapters=(AdapterSpec("french", "nowhere"),)))

        assert engine.generate("a", model="french")[0].ok
        with pytest.raises(InvalidRequest, match="'german' is not served here; use sim, french"):
            engine.generate("a", model="german")

    def test_a_request_that_cannot_run_fails_and_its_neighbours_complete(
        self, start: Start
    ) -> None:
        engine = start().create(replace(SIM, max_model_len=8))

        good, bad = engine.generate(["abc", "a" * 9], max_tokens=2)

        assert good.ok
        assert bad.error is not None
        assert bad.error.code == "INVALID_REQUEST"

    @pytest.mark.parametrize(
        ("prompts", "sampling", "message"),
        [
            (["a", ""], {}, r"prompts\[1\]: prompt: is empty"),
            ([[1], [-1]], {}, r"prompts\[1\]: tokens: token ids must not be negative"),
            ([[1, "x"]], {}, r"prompts\[0\]: tokens: "),
            ([[{"content": "a"}]], {}, r"prompts\[0\]: messages\[0\].role"),
            ([b"a"], {}, "give text, token ids or chat messages"),
            ("a", {"temprature": 1}, "params.temprature: there is no such parameter"),
            ("a", {"temperature": -1}, r"params.temperature: "),
            ("a", {"min_tokens": 9, "max_tokens": 3}, "params.min_tokens: must not exceed"),
            ("a", {"seed": object()}, "params: "),
            ("a", {"tools": []}, r"prompts\[0\]: tools: goes with messages"),
            ([CHAT], {"tools": [5]}, r"tools\[0\]: Expected `object`"),
            ([CHAT], {"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs.tokenize"),
        ],
    )
    def test_bad_input_is_refused_before_anything_runs(
        self, start: Start, prompts: Any, sampling: Any, message: str
    ) -> None:
        engine = start().create(SIM)

        with pytest.raises(InvalidRequest, match=message):
            engine.generate(prompts, **sampling)
        assert engine.generate("a")[0].ok

    def test_a_chat_depends_on_the_arguments_of_its_template(self, start: Start) -> None:
        engine = start().create(SIM)
        tools = [{"type": "function", "function": {"name": "f"}}]

        [plain] = engine.generate([CHAT], max_tokens=9)
        [again, with_tools] = [
            engine.generate([CHAT], max_tokens=9, **given)[0] for given in ({}, {"tools": tools})
        ]

        assert plain.ok
        assert plain.tokens == again.tokens != with_tools.tokens

    def test_threads_share_an_engine(self, start: Start) -> None:
        engine = start(simulated_step_s=0.001).create(SIM)
        prompts = [[f"{thread} {number}" for number in range(5)] for thread in range(8)]

        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda some: engine.generate(some, max_tokens=20), prompts))

        for some, results in zip(prompts, together, strict=True):
            assert results_text(results) == results_text(engine.generate(some, max_tokens=20))

    def test_a_timeout_ends_its_request(self, start: Start) -> None:
        # Given an engine with one place
        engine = start(simulated_step_s=0.01).create(replace(SIM, max_num_seqs=1))

        with pytest.raises(WaitTimeout, match=r"no answer for 0.05 s; 2 requests were given up"):
            engine.generate(["a", "b"], max_tokens=LONG, timeout_s=0.05)

        # I expect the place to be free again.
        assert engine.generate("c", max_tokens=1)[0].ok


def results_text(results: list[Result]) -> list[str | None]:
    return [result.text for result in results]


class TestStreaming:
    def test_pieces_of_a_stream_make_the_whole_answer(self, start: Start) -> None:
        engine = start(simulated_step_s=0.001).create(SIM)

        *pieces, result = engine.stream("abc", max_tokens=10)

        assert isinstance(result, Result)
        deltas = [piece for piece in pieces if isinstance(piece, Delta)]
        assert len(deltas) == len(pieces) > 1
        assert [token for delta in deltas for token in delta.tokens] == result.tokens
        assert "".join(delta.text or "" for delta in deltas) == result.text
        assert result.tokens == engine.generate("abc", max_tokens=10)[0].tokens

    def test_choices_are_kept_apart(self, start: Start) -> None:
        engine = start(simulated_step_s=0.001).create(SIM)

        *pieces, result = engine.stream("abc", max_tokens=5, n=2)

        assert isinstance(result, Result)
        assert result.choices is not None
        for choice in result.choices:
            own = [piece.text or "" for piece in pieces if piece.index == choice.index]
            assert "".join(own) == choice.text

    def test_closing_a_stream_early_ends_its_request(self, start: Start) -> None:
        engine = start(simulated_step_s=0.01).create(replace(SIM, max_num_seqs=1))
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)

        pieces.close()

        assert engine.generate("b", max_tokens=1)[0].ok


class TestDying:
    def test_callers_get_an_error_and_the_engine_returns(self, start: Start) -> None:
        # Given an engine with a spare, and another engine
        controller = start(slots=2, spares=2, simulated_step_s=0.005)
        other, engine = controller.create(SIM), controller.create(SIM)
        controller.wait_warm()
        quiet = other.stream("a", max_tokens=200)
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)
        died = pid_of(controller, engine)

        # If its process dies in the middle of a request
        kill(died)

        # I expect the caller to get an error,
        with pytest.raises(EngineLost, match=r"sim: its process died .*SIGKILL.*loaded again"):
            list(pieces)
        # later requests to be served by another process,
        assert engine.generate("a", max_tokens=3)[0].ok
        # the other engine not to be affected,
        assert len(list(quiet)) > 1
        # and the pool to be complete again.
        controller.wait_warm()
        assert sorted(states(controller)) == [("ready", "sim")] * 2 + [("warm", "")] * 2
        assert died not in {one.pid for one in controller.status()}

    def test_finished_answers_are_not_lost(self, start: Start) -> None:
        # Given an engine with one place, and three requests of which the second kills it
        engine = start(crash_point="poison").create(replace(SIM, max_num_seqs=1))
        (alone,) = engine.generate("a")

        with pytest.raises(EngineLost) as lost:
            engine.generate(["a", POISON, "b"])

        first, *others = lost.value.results
        assert (first and first.tokens, others) == (alone.tokens, [None, None])

    def test_create_fails_if_its_process_dies_again_and_again(self, start: Start) -> None:
        controller = start(crash_point="nowhere", max_backoff_s=0.01)

        with pytest.raises(LoadFailed, match=r"again and again: local: .*crash point 'nowhere'"):
            controller.create(SIM)
        (status,) = controller.status()
        assert "nowhere" in status.fault

    def test_wait_warm_names_processes_that_are_not_warm(self, start: Start) -> None:
        controller = start(crash_point="nowhere")

        with pytest.raises(WaitTimeout, match=r"not warm within 0.1 s: local  "):
            controller.wait_warm(0.1)


class TestLoading:
    def test_a_broken_model_leaves_the_process_warm(self, start: Start) -> None:
        controller = start()
        controller.wait_warm()
        before = controller.status()

        with pytest.raises(LoadFailed, match="bad: RuntimeError: broken model"):
            controller.create(ModelSpec("bad", BROKEN))

        assert [(one.state, one.pid) for one in controller.status()] == [("warm", before[0].pid)]
        assert controller.create(SIM).generate("a")[0].ok

    def test_a_full_pool_names_its_engines(self, start: Start) -> None:
        controller = start(slots=2)
        engine = controller.create(SIM)

        with pytest.raises(NoFreeDevice, match="pair takes 2, 1 free: device 0 holds sim; delete"):
            controller.create(PAIR)
        engine.close()
        assert controller.create(PAIR).devices == (0, 1)

    def test_a_warm_device_is_taken_first(self, start: Start) -> None:
        controller = start(slots=2, backoff_s=60.0, max_backoff_s=60.0)
        controller.wait_warm()
        kill(controller.status()[0].pid)
        eventually(lambda: controller.status()[0].state == "failed")

        assert controller.create(SIM).devices == (1,)

    def test_a_load_that_takes_too_long_is_given_up(self, start: Start) -> None:
        controller = start(simulated_load_s=0.5)
        controller.wait_warm()

        with pytest.raises(WaitTimeout, match=r"sim is not up within 0.05 s"):
            controller.create(SIM, timeout_s=0.05)

        assert controller.create(replace(SIM, name="next")).generate("a")[0].ok

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (replace(SIM, tensor_parallel_size=0), "model: Expected `int` >= 1"),
            (replace(SIM, tensor_parallel_size=2), "sim takes 2 devices, of 1 in all"),
            (replace(SIM, name=""), "model: give it a name"),
            (replace(SIM, sampling={"top_p": 2.0}), "params.top_p"),
            (replace(SIM, engine_args={"a": object()}), "model: "),
        ],
    )
    def test_an_invalid_spec_is_refused(self, start: Start, spec: ModelSpec, message: str) -> None:
        with pytest.raises(InvalidRequest, match=message):
            start().create(spec)

    def test_relative_paths_are_valid_in_the_process(
        self, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a program in another folder, with a folder that is named like the broken model
        (tmp_path / BROKEN).mkdir()
        monkeypatch.chdir(tmp_path)

        # I expect the model in that folder, and the process to get its absolute path.
        assert start().create(ModelSpec("sim", BROKEN)).generate("a")[0].ok


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
        assert engine.devices == (0, 1)

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

        with pytest.raises(LoadFailed, match="broken model"):
            engine._pool.resize(engine._booking, broken, START_S)

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
        engine._pool.put_to_sleep(engine._booking, 7, START_S)

        assert states(controller) == [("warm", "")]
        engine.wake()
        assert engine.generate("a")[0].ok


class TestEnding:
    def test_waiting_callers_get_an_error(self, start: Start) -> None:
        controller = start(simulated_step_s=0.01)
        engine = controller.create(SIM)
        pieces = engine.stream("a", max_tokens=LONG)
        next(pieces)
        pids = [one.pid for one in controller.status()]

        controller.stop()

        with pytest.raises(EngineLost, match="the controller has stopped"):
            list(pieces)
        with pytest.raises(RuntimeError, match="does not run"):
            engine.generate("a")
        engine.close()
        assert controller.status() == []
        assert not any(psutil.pid_exists(pid) for pid in pids)

    def test_running_requests_have_the_grace(self, start: Start) -> None:
        controller = start(simulated_step_s=0.01, grace_s=START_S)
        pieces = controller.create(SIM).stream("a", max_tokens=30)
        next(pieces)

        controller.stop()

        *_, result = pieces
        assert isinstance(result, Result)
        assert result.ok

    def test_a_controller_may_be_stopped_twice_and_started_again(self, start: Start) -> None:
        controller = start()
        controller.start()
        controller.stop()
        controller.stop()
        with pytest.raises(RuntimeError, match="start it first"):
            controller.create(SIM)

        with controller:
            assert controller.create(SIM).generate("a")[0].ok

    def test_a_controller_stops_while_processes_start(self, start: Start) -> None:
        start(slots=2).stop()

    def test_a_waiting_create_gets_an_error(self, start: Start) -> None:
        controller = start(simulated_load_s=60.0)
        controller.wait_warm()

        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(controller.create, SIM)
            eventually(lambda: states(controller) == [("loading", "sim")])
            controller.stop()
            with pytest.raises(EngineLost, match="the controller has stopped"):
                waits.result()

    def test_a_program_that_stops_nothing_ends(self) -> None:
        script = """
from worker import ModelSpec, WorkerController
if __name__ == "__main__":
    controller = WorkerController(engine="simulated", simulated_step_s=0.01)
    controller.start()
    engine = controller.create(ModelSpec("sim", "nowhere"))
    next(engine.stream("a", max_tokens=8000))
    print(controller.status()[0].pid)
"""
        ended = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60.0,
        )

        assert not psutil.pid_exists(int(ended.stdout))


class TestSettings:
    def test_all_faults_are_reported_together(self) -> None:
        with pytest.raises(SettingsError) as caught:
            WorkerController(slots=0, spares=-1, engine="simulated")

        assert len(caught.value.errors) == 2

    def test_a_missing_models_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="cannot be read"):
            WorkerController(tmp_path / "models.toml")

    def test_all_pools_of_a_program_are_of_one_kind(
        self, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The fork-server has the environment of the first.
        start()
        write_distribution(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))

        with pytest.raises(SettingsError, match="use a new process"):
            WorkerController(engine="vllm").start()


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("### The controller", WorkerController), ("### An engine", EngineHandle)],
)
def test_the_page_has_all_verbs(heading: str, kind: type) -> None:
    told = section(page("docs/warm-workers.md"), heading)

    verbs = {name for name in vars(kind) if not name.startswith("_")}
    assert {name.partition("(")[0] for name in first_names(told)} == verbs


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

    def test_a_process_that_keeps_a_whole_model_is_replaced_immediately(self, start: Start) -> None:
        pids = pids_of(start(), CLINGING, 4)

        assert len(set(pids)) >= 3

    def test_operators_may_allow_more(self, start: Start) -> None:
        controller = start(leak_floor_mib=10_000.0)

        assert len(set(pids_of(controller, LEAKY, 2 * READINGS))) == 1
