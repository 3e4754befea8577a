"""vLLM's front end of each model: its own settings, templates and adapters, and clear faults."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.announcements import ModelProfile
from gateway.frontend.engine_client import SHORT
from gateway.http.errors import GatewayError
from tests.engines.harness import MODELS
from tests.unit.gateway.conftest import adder_tokenizer


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Front ends without a queue."""
    adder_tokenizer()  # sets vLLM's environment first
    from vllm.model_executor.models import registry

    from gateway.frontend.models import FrontEnds

    # It would have another process import vLLM, to look at the class of a model that it has not
    # seen before on this machine.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    return FrontEnds(cast(Any, None))


def adder(name: str = "adder", adapters: tuple[str, ...] = (), **arguments: Any) -> ModelProfile:
    arguments = {"max_model_len": 64} | arguments
    return ModelProfile(name, str(MODELS / "adder"), arguments, adapters=adapters)


@pytest.mark.long
async def test_each_model_has_its_own_settings(ends: Any, tmp_path: Path) -> None:
    # Given a template that is not ASCII
    template = "« {{ messages[0]['content'] }} »"
    plain = adder("plain")
    special = adder(
        "special",
        chat_template=template,
        reasoning_parser="granite",
        max_model_len=32,
    )
    states = [await ends.state_of(one) for one in (special, plain)]

    assert [ends.max_model_len(one) for one in (special, plain)] == [32, 64]
    assert [one.online_renderer.chat_template for one in states] == [template, None]
    parsers = [one.args.structured_outputs_config.reasoning_parser for one in states]
    assert parsers == ["granite", ""], "vLLM's defaults are not shared"
    assert await ends.state_of(adder("plain")) is states[1], "made once"
    ends.forget(plain)
    assert await ends.state_of(plain) is not states[1]


async def test_an_adapter_is_found_by_its_name(ends: Any) -> None:
    state = await ends.state_of(adder(adapters=("one", "two")))

    found = state.openai_serving_models.lora_requests
    assert list(found) == ["one", "two"]
    assert found["two"].lora_name == "two"


@pytest.mark.long
async def test_a_model_that_is_not_here_says_what_to_do_and_harms_no_other(
    ends: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(MODELS / "adder", broken)
    (broken / "config.json").write_text("{")
    profiles = {
        "--model-paths gone=PATH": ModelProfile("gone", str(tmp_path / "gone")),
        "cannot serve the model 'broken'": ModelProfile("broken", str(broken)),
        "loads code": ModelProfile("bad", str(MODELS / "adder"), fault="it loads code"),
    }
    for word, profile in profiles.items():
        for _ in range(2):
            with pytest.raises(GatewayError) as refused:
                await ends.state_of(profile)
            assert (refused.value.status, refused.value.param) == (503, "model")
            assert word in refused.value.message
        assert ends.fault(profile) == refused.value.message
        assert ends.failed_at(profile) is not None
    assert await ends.state_of(adder())
    assert ends.fault(adder()) == ""


async def test_an_error_that_nobody_foresaw_is_a_fault_of_its_model(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.frontend import models

    def fails(profile: ModelProfile) -> str:
        raise RuntimeError(f"no {profile.name}")

    monkeypatch.setattr(models, "_missing", fails)

    with pytest.raises(RuntimeError):
        await ends.state_of(adder())
    assert ends.failed_at(adder()) is not None, "it is tried again later"
    assert ends.fault(adder()) == "RuntimeError('no adder')"


async def test_many_at_once_are_made_a_few_at_a_time(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.frontend import models

    running, most = 0, 0
    real = models.model_state

    def counted(*given: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return real(*given)
        finally:
            running -= 1

    monkeypatch.setattr(models, "model_state", counted)

    profiles = [adder(f"m{number}") for number in range(8)]
    await asyncio.gather(*map(ends.state_of, profiles))
    assert most <= 3


async def test_events_pass_neither_metrics_nor_cors_of_vllm(ends: Any) -> None:
    names, passed = [], ends.app.middleware_stack
    while passed is not None:
        names.append(type(passed).__name__)
        passed = getattr(passed, "app", None)
    assert "APIRouter" in names  # it saw the whole way
    assert not {"PrometheusInstrumentatorMiddleware", "CORSMiddleware"} & {*names}


async def test_only_long_prompts_are_tokenized_in_a_thread(ends: Any) -> None:
    renderer = (await ends.state_of(adder())).engine_client.renderer
    short, long = "1+2=", "1" * (SHORT + 1)
    params = renderer.default_cmpl_tok_params

    def tokenize(text: str) -> Any:
        return renderer._tokenize_prompt_async({"prompt": text}, params)

    # Given a prompt that takes no turn of the event loop, and one that does
    assert _takes_turns(tokenize(short)) is False
    in_thread = asyncio.ensure_future(tokenize(long))
    await asyncio.sleep(0)

    # If the thread has the tokenizer, I expect a short one to wait for it there
    behind = tokenize(short)
    assert _takes_turns(behind) is True
    for found, text in ((await in_thread, long), (await tokenize(short), short)):
        assert found == renderer._tokenize_prompt({"prompt": text}, params)


def _takes_turns(call: Coroutine[Any, Any, Any]) -> bool:
    """Whether a call waits for something; it is ended there."""
    try:
        call.send(None)
    except StopIteration:
        return False
    call.close()
    return True
