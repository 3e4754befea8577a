"""The simulated engine beyond the suite: speed, crashes, honesty."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import sys
from typing import Any

import msgspec
import pytest

from tests.engines.harness import ask, drain, exit_status, greedy, refused_field, run
from tests.support.builders import make_assignment, make_request
from tests.support.fake_clock import FakeClock
from tokenyard.protocol.errors import Code
from tokenyard.protocol.wire import SamplingParams, StructuredOutputs
from worker.engines import Finished, RequestError, TokenDelta
from worker.engines.crash_points import FAULTY, POISON, CrashPoint
from worker.engines.simulated.engine import SimulatedEngine, SpeedModel


def test_a_slow_engine_tells_how_far_a_whole_answer_is() -> None:
    engine = SimulatedEngine(speed=SpeedModel(decode_tokens_per_s=1e6))
    engine.add(make_assignment(make_request(params=SamplingParams(max_tokens=9)), entry="1-0"))

    engine.step()
    engine.step()

    assert engine.progress() == {"1-0": 2}


def test_two_engines_give_the_same_tokens_for_the_same_request() -> None:
    given = ask(tokens=[1, 2, 3], max_tokens=50)

    (first,), (second,) = run(SimulatedEngine(), given), run(SimulatedEngine(), given)

    assert first.tokens == second.tokens
    assert len(set(first.tokens)) > 30


def test_tokens_depend_on_prompt_and_seed() -> None:
    engine = SimulatedEngine()
    given: list[dict[str, Any]] = [
        {"tokens": [1, 2]},
        {"tokens": [2, 1]},
        {"tokens": [1, 2], "seed": 1},
        {"prompt": "\u0001\u0002\u0003"},
        {"messages": [{"role": "user", "content": "a"}]},
    ]

    answers = [tuple(run(engine, ask(**fields))[0].tokens) for fields in given]

    assert len(set(answers)) == len(given)


def test_the_recorded_answer_has_not_changed() -> None:
    # Benchmarks and recorded schedules compare versions.
    (outcome,) = run(SimulatedEngine(), ask(tokens=[1, 2, 3], max_tokens=4))

    assert outcome.tokens == [24148, 10890, 6908, 29047]


def test_without_limits_an_answer_takes_one_step() -> None:
    engine = SimulatedEngine()
    for at in range(1_000):
        engine.add(ask(f"{at}-0", max_tokens=32))

    events = engine.step()

    assert len(events) == 1_000
    assert not engine.has_unfinished


def test_a_stream_gives_some_tokens_with_each_step() -> None:
    engine = SimulatedEngine(speed=SpeedModel(tokens_per_step=5))
    engine.add(ask(max_tokens=12, stream=True))

    steps = [engine.step() for _ in range(3)]

    assert [type(event) for (event,) in steps] == [TokenDelta, TokenDelta, Finished]
    assert [len(step[0].tokens) for step in steps[:2] if isinstance(step[0], TokenDelta)] == [5, 5]
    assert not engine.has_unfinished


def test_the_batch_is_limited_and_the_rest_waits() -> None:
    engine = SimulatedEngine(speed=SpeedModel(max_num_seqs=2))
    for at in range(5):
        engine.add(ask(f"{at}-0", max_tokens=1))

    assert [len(engine.step()) for _ in range(3)] == [2, 2, 1]
    assert engine.info.max_num_seqs == 2


def test_steps_take_the_time_of_the_speed_model(fake_clock: FakeClock) -> None:
    began = fake_clock.now
    speed = SpeedModel(prefill_tokens_per_s=100.0, decode_tokens_per_s=100.0)
    engine = SimulatedEngine(speed=speed)
    for at in range(3):
        engine.add(ask(f"{at}-0", tokens=[1, 2], max_tokens=5))

    drain(engine, {})

    # Six prompt tokens and five steps, however many requests share them.
    assert fake_clock.now - began == pytest.approx(0.11)


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"structured_outputs": StructuredOutputs(regex="1")},
        {"stop": "1"},
    ],
    ids=str,
)
def test_requests_that_need_invented_output_are_refused(params: dict[str, Any]) -> None:
    assert refused_field(SimulatedEngine(), ask(**params)) == f"params.{next(iter(params))}"


def test_closing_twice_is_harmless() -> None:
    engine = SimulatedEngine()
    engine.add(greedy())

    engine.close()
    engine.close()

    assert not engine.has_unfinished


@pytest.mark.parametrize("text", ["nowhere", "mid_stream:0", "mid_stream:-1", "mid_stream:soon"])
def test_an_unknown_crash_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        CrashPoint(text)


def _stream_ten_tokens(crash_point: str, steps: Any) -> None:
    engine = SimulatedEngine(crash_point=crash_point)
    engine.add(ask(max_tokens=10, stream=True))
    while engine.has_unfinished:
        engine.step()
        steps.value += 1


@pytest.mark.crash
@pytest.mark.parametrize(
    ("crash_point", "whole_steps"),
    [("before_step:4", 3), ("mid_stream", 0), ("mid_stream:6", 5), ("before_finish", 9)],
)
def test_the_engine_dies_at_its_crash_point(crash_point: str, whole_steps: int) -> None:
    steps = multiprocessing.get_context("spawn").Value("i", 0)

    assert exit_status(_stream_ten_tokens, crash_point, steps) == -signal.SIGKILL
    assert steps.value == whole_steps


def _serve(crash_point: str, tokens: list[int]) -> None:
    engine = SimulatedEngine(crash_point=crash_point)
    run(engine, ask(tokens=tokens, max_tokens=4))


@pytest.mark.crash
@pytest.mark.parametrize(
    ("crash_point", "tokens", "status"),
    [
        ("poison", [*POISON, 1], -signal.SIGSEGV),
        ("poison", [1, *POISON], 0),
        ("", [*POISON, 1], 0),
        ("fault", [*POISON, 1], 0),
    ],
)
def test_poison_kills_at_its_crash_point(crash_point: str, tokens: list[int], status: int) -> None:
    assert exit_status(_serve, crash_point, tokens) == status


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_fails_as_often_as_configured(stream: bool) -> None:
    # Given an engine that fails twice
    engine = SimulatedEngine(crash_point="fault:2")
    asked = ask(tokens=[*FAULTY, 1], stream=stream, max_tokens=4)
    neighbour = ask("2-0", stream=True, max_tokens=4)

    first, sound = run(engine, asked, neighbour)
    (third,) = run(engine, msgspec.structs.replace(asked, faults=2))

    # I expect a fault after the first tokens, no harm to others, and then an answer.
    assert first.fault == RequestError("1-0", Code.INFERENCE_ERROR, "told to fail")
    assert len(first.streamed()) == int(stream)
    assert len(sound.tokens) == len(third.tokens) == 4


def test_taking_a_request_out_returns_its_tokens_and_removes_it() -> None:
    # Given a batch of one with a stream, and another request that waits
    engine = SimulatedEngine(speed=SpeedModel(max_num_seqs=1))
    engine.add(ask("1-0", stream=True, max_tokens=9, published=[7]))
    engine.add(ask("2-0", max_tokens=3))
    engine.step()

    running, waiting, unknown = (engine.take_out(key) for key in ("1-0", "2-0", "3-0"))

    # I expect the tokens of all attempts of the first, none of the second, and both removed.
    assert running is not None
    assert waiting is not None
    assert running.choices[0].tokens[0] == 7
    assert len(running.choices[0].tokens) == 2
    assert list(waiting.choices[0].tokens) == []
    assert unknown is None
    assert not engine.has_unfinished


def test_a_request_without_stream_tells_its_tokens_when_it_is_taken_out() -> None:
    engine = SimulatedEngine(speed=SpeedModel(decode_tokens_per_s=1e6))
    engine.add(ask("1-0", max_tokens=9, n=2))
    for _ in range(5):
        engine.step()

    made = engine.take_out("1-0")

    assert made is not None
    assert [len(choice.tokens) for choice in made.choices] == [5, 5]


def test_the_engine_needs_neither_torch_nor_vllm() -> None:
    import subprocess

    code = (
        "import sys, worker.engines.simulated.engine, worker.engines.vllm.environment\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )

    assert done.stdout.strip() == "[]"


class TestPrefixCache:
    """Prompts with a common beginning; the cache of the engine has ten blocks of sixteen tokens."""

    @staticmethod
    def ask(engine: SimulatedEngine, prompt: list[int], **fields: Any) -> Finished:
        params = SamplingParams(max_tokens=16)
        engine.add(make_assignment(make_request(tokens=prompt, params=params, **fields)))
        [end] = engine.step()
        assert isinstance(end, Finished)
        return end

    @staticmethod
    def engine(tokens: int = 160) -> SimulatedEngine:
        return SimulatedEngine(speed=SpeedModel(cache_tokens=tokens))

    def test_whole_blocks_that_were_cached_are_reported(self) -> None:
        engine, prompt = self.engine(), list(range(40))

        assert self.ask(engine, prompt).cached_tokens == 0
        assert self.ask(engine, prompt).cached_tokens == 32
        assert self.ask(engine, prompt[:20] + [7] * 20).cached_tokens == 16

    def test_the_last_token_is_never_cached(self) -> None:
        engine, prompt = self.engine(), list(range(32))
        self.ask(engine, prompt)

        assert self.ask(engine, prompt).cached_tokens == 16

    def test_a_prompt_reuses_the_blocks_of_an_answer(self) -> None:
        engine, prompt = self.engine(), list(range(32))
        answer = self.ask(engine, prompt).choices[0].tokens

        assert self.ask(engine, [*prompt, *answer, 1, 2]).cached_tokens == 48

    def test_the_cache_is_bounded_and_forgets_the_oldest(self) -> None:
        engine = self.engine()
        old, new = [1] * 80, [2] * 96
        self.ask(engine, old)
        self.ask(engine, new)

        assert self.ask(engine, new).cached_tokens == 80
        assert self.ask(engine, old).cached_tokens == 48, "its end is gone"

    @pytest.mark.parametrize(
        ("own", "other"),
        [
            ({"model": "adapter"}, {"model": "another"}),
            ({"cache_salt": "mine"}, {"cache_salt": "yours"}),
        ],
    )
    def test_requests_share_blocks_only_under_the_same_adapter_and_salt(
        self, own: dict[str, str], other: dict[str, str]
    ) -> None:
        engine, prompt = self.engine(), list(range(40))
        self.ask(engine, prompt)

        assert self.ask(engine, prompt, **own).cached_tokens == 0
        assert self.ask(engine, prompt, **own).cached_tokens == 32
        assert self.ask(engine, prompt, **other).cached_tokens == 0

    def test_tenants_do_not_share_blocks(self) -> None:
        engine, prompt = self.engine(), list(range(40))
        for salt in ("", "a"):
            self.ask(engine, prompt, tenant="acme", cache_salt=salt)
            assert self.ask(engine, prompt, tenant="evil", cache_salt=salt).cached_tokens == 0
            assert self.ask(engine, prompt, tenant="acme", cache_salt=salt).cached_tokens == 32
        # Nor does a salt lead into those of another tenant.
        assert self.ask(engine, prompt, cache_salt="acme/").cached_tokens == 0
        assert self.ask(engine, prompt, tenant="evil", cache_salt="acme/a").cached_tokens == 0

    def test_the_first_delta_tells_what_was_cached(self) -> None:
        engine, prompt = self.engine(), list(range(40))
        self.ask(engine, prompt)
        params = SamplingParams(max_tokens=4, n=2)
        request = make_request(tokens=prompt, params=params, stream=True)
        engine.add(make_assignment(request))

        events = [engine.step() for _ in range(3)]

        deltas = [one for step in events for one in step if isinstance(one, TokenDelta)]
        assert [one.cached_tokens for one in deltas] == [32, None, None, None, None, None]

    @pytest.mark.parametrize("forget", ["reload", "sleep"])
    def test_a_reload_and_a_sleep_forget_all_blocks(self, forget: str) -> None:
        engine, prompt = self.engine(), list(range(40))
        self.ask(engine, prompt)
        if forget == "reload":
            engine.reload("/step-2")
        else:
            engine.sleep(1)
            engine.wake()

        assert self.ask(engine, prompt).cached_tokens == 0

    def test_cached_blocks_take_no_time(self, fake_clock: FakeClock) -> None:
        # Given a prefill of ten seconds for a prompt
        speed = SpeedModel(prefill_tokens_per_s=100.0, cache_tokens=2000)
        engine, prompt = SimulatedEngine(speed=speed), list(range(1000))

        times = [fake_clock.now]
        for _ in range(2):
            self.ask(engine, prompt)
            times.append(fake_clock.now)

        # I expect that time once, and afterwards only that of the last block.
        first, second = (after - before for before, after in itertools.pairwise(times))
        assert (first, second) == pytest.approx((10.0, 0.08))

    def test_without_a_cache_nothing_is_reported(self) -> None:
        assert self.engine(0).info.cache_tokens == 0
        assert self.ask(self.engine(0), list(range(40))).cached_tokens is None
