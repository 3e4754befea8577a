"""What a bridge sends, as the installed vLLM reads it."""

from __future__ import annotations

import struct
from typing import Any, get_args

import msgspec
import pytest

from gateway.bridge import engine_core
from gateway.bridge.engine_core import FINISH_REASONS, KNOWN, FailureForm, Row, rows_of

_ROWS: list[Row] = [[(7, -0.5, 1), (7, -0.5, 1), (8, -1.5, 2)], [(9, -2.5, 3)]]


def decoded(kind: Any, message: object) -> Any:
    """A message by vLLM's own decoder."""
    from vllm.v1.serial_utils import MsgpackDecoder

    return MsgpackDecoder(kind).decode(msgspec.msgpack.encode(message))


def outputs(*made: list[Any]) -> list[Any]:
    from vllm.v1.engine import EngineCoreOutputs

    found: list[Any] = decoded(EngineCoreOutputs, [0, made, None, 1.0, None, ["x"]]).outputs
    return found


def test_tokens_and_their_end() -> None:
    plain, last = outputs(
        engine_core.output("a", [1, 2]),
        engine_core.output(
            "b", [3], finish=FINISH_REASONS["length"], stop=5, prefill=(10, 4), rows=_ROWS
        ),
    )
    assert (plain.request_id, plain.new_token_ids, plain.finished) == ("a", [1, 2], False)
    assert (str(last.finish_reason), last.stop_reason) == ("length", 5)
    assert last.prefill_stats.num_prompt_tokens == 10
    assert last.prefill_stats.num_cached_tokens == 4
    ids, logprobs, ranks, *_ = last.new_logprobs
    assert ids.tolist() == [[7, 7, 8], [9, 9, 9]]
    assert logprobs.tolist() == [[-0.5, -0.5, -1.5], [-2.5, -2.5, -2.5]]
    assert ranks.tolist() == [1, 3]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_logprobs_of_a_prompt() -> None:
    (made,) = outputs(engine_core.output("a", [1], prompt_rows=_ROWS, prefill=(2, 0)))
    ids, logprobs, ranks, *_ = made.new_prompt_logprobs_tensors
    assert ids.tolist() == [[7, 7, 8], [9, 9, 9]]
    assert logprobs.shape == (2, 3)
    assert ranks.tolist() == [1, 3]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_numbers_of_a_task_that_pools() -> None:
    numbers = struct.pack("<6f", *range(6))
    stop = FINISH_REASONS["stop"]
    (made,) = outputs(
        engine_core.output("a", [], finish=stop, prefill=(3, 0), pooled=([2, 3], numbers))
    )
    assert made.pooling_output.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert (str(made.finish_reason), made.prefill_stats.num_prompt_tokens) == ("stop", 3)


def test_errors() -> None:
    for form in get_args(FailureForm):
        (made,) = outputs(engine_core.failed("a", "why", form=form))
        assert str(made.finish_reason) == "error"


def test_the_installed_front_end_outlives_the_failure_of_a_task_that_pools() -> None:
    import vllm
    from vllm import PoolingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    processor = OutputProcessor(None, log_stats=False)
    params = PoolingParams(task="embed")
    asked = EngineCoreRequest(
        "a", [1, 2], None, None, params, 0.0, None, None, None, external_req_id="a"
    )
    queue = RequestOutputCollector(params.output_kind, "a")
    processor.add_request(asked, None, queue=queue)
    form = engine_core.failure_form(vllm.__version__, "embed")
    processor.process_outputs(outputs(engine_core.failed("a", "why", form=form)))
    if form == "told":
        with pytest.raises(Exception, match="why"):
            queue.get_nowait()
        return
    answer: Any = queue.get_nowait()
    assert answer.finished
    assert answer.error is not None
    assert answer.error.retryable


def test_the_rows_of_a_reply() -> None:
    entry = {
        "token": 7,
        "logprob": None,
        "rank": None,
        "top": [{"token": 8, "logprob": -1.0, "rank": 1}],
    }
    assert rows_of([entry]) == [[(7, -9999.0, 0), (8, -1.0, 1)]]
    assert rows_of([]) is rows_of(None) is None


def test_what_makes_a_front_end_know_an_engine() -> None:
    from vllm.v1.engine import EngineCoreReadyResponse

    told = decoded(
        EngineCoreReadyResponse, msgspec.msgpack.decode(engine_core.ready(64, 0, "0.32.0"))
    )
    assert (told.max_model_len, told.supports_lora) == (64, False)
    assert msgspec.msgpack.decode(engine_core.ready(64, 2, "0.32.0"))["supports_lora"]


def test_each_field_stands_where_the_installed_vllm_has_it() -> None:
    import vllm
    from vllm import PoolingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

    # Newer ones have more at the end.
    theirs = PoolingParams.__struct_fields__
    assert engine_core.EnginePoolingParams.__struct_fields__[: len(theirs)] == theirs
    assert vllm.__version__.startswith(KNOWN), "try its front ends, and record what they say"
    ours = engine_core.EngineCoreRequest.__struct_fields__
    assert EngineCoreRequest.__struct_fields__[: len(ours)] == ours
    places = EngineCoreOutput.__struct_fields__
    wanted = {"request_id": 0, "new_token_ids": 1, "new_logprobs": 2, "finish_reason": 5}
    wanted["pooling_output"] = 4
    wanted |= {"new_prompt_logprobs_tensors": 3, "stop_reason": 6, "prefill_stats": 11}
    assert {name: places.index(name) for name in wanted} == wanted
