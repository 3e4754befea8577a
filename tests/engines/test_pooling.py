"""Tasks that pool: the numbers of each kind of model are those of `vllm.LLM`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import tokenyard
from benchmarks.pooling_models import ENGINE_ARGS, Kind, write_pooling_model
from tests.engines.harness import refused_field, run, spec_of
from tests.support.builders import make_assignment
from tests.support.llm import answers_of_llm
from tokenyard.protocol.replies import Result
from tokenyard.protocol.wire import Assignment, PoolingParams, Request, Task, pack_tokens
from worker.engines import Backend, Engine, PoolingOutput

pytestmark = pytest.mark.vllm

TEXTS: Final = ("a text", "another one, which is longer", "x1")
QUERY: Final = "what is a text"
LONG: Final = "many words " * 400
#: What each kind of model does, the first as `vllm.LLM` calls it.
TASKS_OF: Final[dict[Kind, tuple[Task, ...]]] = {
    "bert": ("embed", "score"),
    "cross": ("classify", "score"),
    "labels": ("classify",),
    "colbert": ("token_embed", "score"),
    "qwen_embed": ("embed", "score"),
    "qwen_rank": ("classify", "score"),
    "reward": ("token_classify",),
}
#: Rounding in another batch.
NEAR: Final = {"rtol": 0, "atol": 1e-6}


def asked(task: Task, *, key: str = "1-0", **fields: Any) -> Assignment:
    query = QUERY if task == "score" else ""
    return make_assignment(Request(id=key, task=task, query=query, **fields), entry=key)


def numbers(engine: Engine, task: Task, **fields: Any) -> PoolingOutput:
    (outcome,) = run(engine, asked(task, **fields))
    assert outcome.finished is not None, outcome.fault
    assert outcome.finished.pooling is not None
    assert not outcome.deltas
    return outcome.finished.pooling


def arrays(made: PoolingOutput) -> list[Any]:
    result = Result(
        id="q", status="completed", tokens=[], data=made.data, shapes=[*map(_shape, made.shapes)]
    )
    found = tokenyard.arrays(result)
    assert sum(one.nbytes for one in found if one is not None) == len(made.data)
    return list[Any](found)


def _shape(shape: Sequence[int] | None) -> list[int] | None:
    return None if shape is None else list(shape)


@contextmanager
def loaded(backend: Backend, kind: Kind, folder: Path) -> Iterator[Engine]:
    spec = spec_of(kind, folder, engine_args=ENGINE_ARGS[kind], kv_cache_gib=1 / 16)
    engine = backend.load(spec)
    try:
        yield engine
    finally:
        engine.close()


def test_the_numbers_are_those_of_vllm(backend: Backend, tmp_path: Path) -> None:
    """Those of other kinds are compared in `tests/gateway/test_every_kind.py`."""
    folder, tasks = write_pooling_model("bert", tmp_path / "model"), TASKS_OF["bert"]
    expected = answers_of_llm(folder, tmp_path, pool=tasks, texts=TEXTS, query=QUERY)

    with loaded(backend, "bert", folder) as engine:
        assert set(engine.info.tasks) == set(tasks)
        for task in tasks:
            together = arrays(numbers(engine, task, inputs=list(TEXTS)))
            alone = [arrays(numbers(engine, task, prompt=text))[0] for text in TEXTS]
            assert len({str(one) for one in together}) == len(TEXTS)
            for one, same, theirs in zip(together, alone, expected[task], strict=True):
                assert one.shape == np.shape(theirs)
                np.testing.assert_allclose(one, theirs, **NEAR)
                np.testing.assert_allclose(same, theirs, **NEAR)


def test_an_embedding_model(backend: Backend, tmp_path: Path) -> None:
    folder = write_pooling_model("bert", tmp_path / "model")
    with loaded(backend, "bert", folder) as engine:
        _an_input_fails_alone(engine)
        _what_cannot_run_is_refused(engine)
        _ids_are_the_text(engine)
        _many_inputs_take_many_steps(engine)
        _what_is_dropped_leaves_nothing(engine)
        _params_count(engine)


def _an_input_fails_alone(engine: Engine) -> None:
    made = numbers(engine, "embed", inputs=[TEXTS[0], LONG, [10**6], [[5], [6]], TEXTS[1]])

    assert [shape is None for shape in made.shapes] == [False, True, True, True, False]
    assert [made.errors[at].message.partition(":")[0] for at in sorted(made.errors)] == [
        "inputs[1]",
        "inputs[2]",
        "inputs[3]",
    ]
    assert [tokens > 0 for tokens in made.input_tokens] == [True, False, False, False, True]
    good = arrays(numbers(engine, "embed", inputs=[TEXTS[0], TEXTS[1]]))
    np.testing.assert_allclose(arrays(made)[4], good[1], **NEAR)
    all_bad = numbers(engine, "score", inputs=[LONG, LONG])
    assert (all_bad.data, sorted(all_bad.errors)) == (b"", [0, 1])


def _what_cannot_run_is_refused(engine: Engine) -> None:
    assert refused_field(engine, asked("embed", prompt=LONG)) == "prompt"
    assert refused_field(engine, asked("embed", tokens=pack_tokens([10**6]))) == "tokens"
    assert refused_field(engine, asked("classify", prompt="x")) == "task"
    assert refused_field(engine, asked("generate", prompt="x")) == "task"
    dimensions = PoolingParams(dimensions=8)
    assert refused_field(engine, asked("embed", prompt="x", pooling=dimensions)) == "params"
    strange = PoolingParams(returned_token_ids=[10**6])
    field = refused_field(engine, asked("embed", prompt="x", pooling=strange))
    assert field == "params.returned_token_ids"
    long_query = Request(id="q", task="score", query=LONG, inputs=["x"])
    assert refused_field(engine, make_assignment(long_query)) == "query"


def _ids_are_the_text(engine: Engine) -> None:
    ids = [2, 5, 3]  # [CLS] a [SEP]
    (text,) = arrays(numbers(engine, "embed", prompt="a"))
    (tokens,) = arrays(numbers(engine, "embed", tokens=pack_tokens(ids)))
    (among,) = arrays(numbers(engine, "embed", inputs=[list[Any](ids)]))
    for one in (tokens, among):
        np.testing.assert_allclose(one, text, **NEAR)


def _many_inputs_take_many_steps(engine: Engine) -> None:
    """More than a step takes, and than a byte counts."""
    texts = [f"{number} texts" for number in range(300)]
    made = numbers(engine, "embed", inputs=list[Any](texts))
    last = arrays(numbers(engine, "embed", prompt=texts[-1]))
    assert made.shapes == [[128]] * 300
    np.testing.assert_allclose(arrays(made)[-1], last[0], **NEAR)


def _what_is_dropped_leaves_nothing(engine: Engine) -> None:
    engine.add(asked("embed", inputs=[*TEXTS] * 20))
    engine.add(asked("embed", key="2-0", inputs=[*TEXTS] * 20))
    engine.step()
    engine.abort(["1-0"])
    engine.step()
    made = engine.take_out("2-0")
    assert made is not None
    assert made.pooling is None
    assert made.prompt_tokens > 0
    assert not engine.has_unfinished
    front: Any = engine
    assert not front._branches
    assert not front._engine.has_unfinished_requests()


def _params_count(engine: Engine) -> None:
    plain = arrays(
        numbers(engine, "embed", prompt="abc", pooling=PoolingParams(use_activation=False))
    )
    assert np.linalg.norm(plain[0]) > 1.5  # else it is normalized
    cut = PoolingParams(truncate_prompt_tokens=-1)
    whole = numbers(engine, "embed", inputs=[LONG], pooling=cut)
    assert whole.input_tokens == [engine.info.max_model_len]


@pytest.mark.long
def test_a_pair_of_ids_is_the_pair_of_its_texts(backend: Backend, tmp_path: Path) -> None:
    with loaded(backend, "cross", write_pooling_model("cross", tmp_path / "model")) as engine:
        pair: list[Any] = [[2, 5, 3], [6, 3]]  # [CLS] a [SEP], b [SEP]
        flat: list[Any] = [2, 5, 3, 6, 3]
        made = arrays(numbers(engine, "classify", inputs=[pair, flat]))
        request = Request(id="s", task="score", query="a", inputs=["b"])
        (outcome,) = run(engine, make_assignment(request))
        assert outcome.finished is not None
        assert outcome.finished.pooling is not None
        score = arrays(outcome.finished.pooling)
    np.testing.assert_allclose(made[0][0], score[0], **NEAR)
    assert abs(made[1][0] - score[0]) > 1e-5
