"""A program's own engines: prompts, parameters, streams, and what callers get at a death."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.local_pool import LONG, SIM, Start, kill, pid_of, states
from tokenyard.protocol.errors import EngineLost, InvalidRequest, LoadFailed, WaitTimeout
from tokenyard.protocol.replies import Delta, Result
from worker import AdapterSpec
from worker.engines.crash_points import POISON

CHAT = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


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
            ([b"a"], {}, "give text, token ids or chat messages"),
            ("a", {"temprature": 1}, "params.temprature: there is no such parameter"),
            ("a", {"seed": object()}, "params: "),
            ("a", {"tools": []}, r"prompts\[0\]: tools: goes with messages"),
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
