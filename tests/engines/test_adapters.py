"""LoRA adapters: requests name them like models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engines.adapters import RANK, merge, write_adapter
from tests.engines.harness import MODELS, greedy, run, spec_of
from tokenyard.protocol.errors import InvalidRequest
from worker.engines import Backend, Engine
from worker.models import AdapterSpec

pytestmark = pytest.mark.vllm

PROMPTS = [
    f"{left}+{right}=" for left, right in zip(range(10, 90, 9), range(80, 0, -9), strict=True)
]


def answers(engine: Engine, model: str = "") -> list[list[int]]:
    """Greedy tokens for all prompts."""
    asked = [
        greedy(f"{at}-0", prompt=prompt, model=model, stream=at % 2 == 0)
        for at, prompt in enumerate(PROMPTS)
    ]
    return [outcome.tokens for outcome in run(engine, *asked)]


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[AdapterSpec, AdapterSpec]:
    """Two adapters for the adder."""
    first, second = (
        write_adapter(tmp_path / name, MODELS / "adder", seed)
        for seed, name in enumerate(("left", "right"))
    )
    return first, second


def test_an_adapter_gives_the_tokens_of_the_merged_model(
    backend: Backend, adapters: tuple[AdapterSpec, AdapterSpec], tmp_path: Path
) -> None:
    # Given the tokens of the base and of the models with merged weights
    merged = []
    for adapter in adapters:
        path = merge(tmp_path / f"merged-{adapter.name}", MODELS / "adder", adapter)
        engine = backend.load(spec_of(adapter.name, path))
        merged.append(answers(engine))
        engine.close()
    engine = backend.load(spec_of("adder"))
    plain = answers(engine)
    engine.close()

    # If one engine serves the base and both adapters
    engine = backend.load(spec_of("adder", adapters=adapters, max_lora_rank=RANK))
    by_name = {name: answers(engine, name) for name in ("left", "right", "adder", "")}
    mixed = run(
        engine,
        *[
            greedy(f"{at}-0", prompt=PROMPTS[0], model=name)
            for at, name in enumerate(("left", "adder", "right"))
        ],
    )
    info = engine.info
    engine.close()

    # I expect each to give the same tokens, alone and in one batch.
    assert info.adapters == ("left", "right")
    assert by_name == {"left": merged[0], "right": merged[1], "adder": plain, "": plain}
    assert [one.tokens for one in mixed] == [merged[0][0], plain[0], merged[1][0]]
    assert len({str(tokens) for tokens in by_name.values()}) == 3


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_give_the_same_tokens_after_a_sleep(
    backend: Backend, adapters: tuple[AdapterSpec, AdapterSpec], level: int
) -> None:
    engine = backend.load(spec_of("adder", adapters=adapters, max_lora_rank=RANK))
    names = ("left", "right", "adder")
    before = [answers(engine, name) for name in names]

    engine.sleep(level)
    engine.wake()

    after = [answers(engine, name) for name in names]
    engine.close()
    assert after == before


def test_an_unreadable_adapter_fails_the_load_and_no_request(
    backend: Backend, adapters: tuple[AdapterSpec, AdapterSpec]
) -> None:
    Path(adapters[0].path, "adapter_model.safetensors").write_bytes(b"nonsense")

    with pytest.raises(Exception, match="left"):
        backend.load(spec_of("adder", adapters=adapters, max_lora_rank=RANK))


@pytest.mark.parametrize("model", ["", "left"])
def test_scores_of_prompts_never_share_a_step_on_a_cpu(
    backend: Backend, adapters: tuple[AdapterSpec, AdapterSpec], model: str
) -> None:
    """As of lm-eval's loglikelihood: vLLM's CPU kernels fail, and the process with them."""
    scored = [
        greedy(f"{at}-0", prompt=prompt, model=model, prompt_logprobs=1, max_tokens=1)
        for at, prompt in enumerate(PROMPTS[:3])
    ]
    spec = spec_of("adder", adapters=adapters, max_lora_rank=RANK)

    engine = backend.load(spec)
    with pytest.raises(InvalidRequest, match="max_num_seqs = 1") as caught:
        run(engine, *scored)
    # Tokens of a worker that died are part of the prompt here.
    behind = run(
        engine, *[greedy(f"{at}-0", published=[5, 6, 7], stream=True, logprobs=0) for at in (1, 2)]
    )
    engine.close()
    engine = backend.load(replace(spec, max_num_seqs=1))
    alone = [one.finished and one.finished.prompt_logprobs for one in run(engine, *scored)]
    engine.close()

    assert caught.value.field == "params.prompt_logprobs"
    assert [len(scores or ()) for scores in alone] == [len(PROMPTS[0])] * 3
    for one in behind:
        known = [entry["logprob"] is not None for entry in one.choice.logprobs or ()]
        assert known == [False] * 3 + [True] * (len(one.tokens) - 3)
