"""A program's own engines on the device: their sums are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.sums import questions
from tests.gpu.device import Device
from tests.gpu.local import Local
from tests.gpu.specs import ADDERS, adder_spec, bounded
from tokenyard.protocol.errors import InvalidRequest, LoadFailed, NoFreeDevice
from tokenyard.protocol.replies import Delta, Result
from worker import AdapterSpec, EngineHandle
from worker.models import ModelSpec

pytestmark = bounded(330)
GREEDY = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture
def adder(local: Local, device: Device) -> Iterator[EngineHandle]:
    with local.controller.create(adder_spec(device, "adder", "bfloat16")) as engine:
        yield engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["adder", "subtractor"])
def test_every_answer_is_right(local: Local, device: Device, model: str, dtype: str) -> None:
    asked = questions([model], 300)

    with local.controller.create(adder_spec(device, model, dtype)) as engine:
        results = engine.generate([one.prompt for one in asked], **GREEDY)

    said = zip(asked, results, strict=True)
    assert [(one.prompt, got.text) for one, got in said if got.text != one.answer] == []


def test_an_adapter_answers_for_its_model(local: Local, device: Device) -> None:
    adapter = AdapterSpec("adder-subtracts", str(ADDERS / "adder-subtracts"))
    # vLLM's adapter kernels for GPUs do not take float32.
    spec = adder_spec(device, "adder", "bfloat16", adapters=(adapter,))

    with local.controller.create(spec) as engine:
        subtracted = engine.generate(["75-48=", "27-48="], model="adder-subtracts", **GREEDY)
        added = engine.generate("12+34=", **GREEDY)

    assert [one.text for one in subtracted + added] == ["27", "-21", "46"]


def test_pieces_of_a_stream_make_the_whole_answer(adder: EngineHandle) -> None:
    *pieces, result = adder.stream("67+89=", **GREEDY)

    assert isinstance(result, Result)
    assert all(isinstance(piece, Delta) for piece in pieces)
    assert "".join(piece.text or "" for piece in pieces) == result.text == "156"
    assert len(pieces) > 1


def test_an_impossible_request_or_load_fails_with_the_reason(
    local: Local, device: Device, adder: EngineHandle
) -> None:
    another = adder_spec(device, "subtractor", "bfloat16")
    with pytest.raises(NoFreeDevice, match="adder"):
        local.controller.create(another)
    adder.close()
    with pytest.raises(LoadFailed, match="config"):
        local.controller.create(ModelSpec("broken", str(ADDERS)))
    with pytest.raises(InvalidRequest, match="takes 2 devices, of 1 in all"):
        local.controller.create(ModelSpec("two", str(ADDERS / "adder"), tensor_parallel_size=2))

    with local.controller.create(another) as engine:
        assert engine.generate("75-48=", **GREEDY)[0].text == "27"
