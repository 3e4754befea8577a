"""The short way from text to token ids gives the same ids as transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.chats import tokenizer_json
from tests.engines.harness import MODELS
from tests.support.absence import imported
from worker.engines.prompts import remember_end_token, text_encoder

pytestmark = pytest.mark.vllm

WORDS = ["<s>", "</s>", "<unk>", "a", "b", "é"]
TEXTS = ["a b", "<s>a b</s>", "<s> a", " a  b ", "é b", "b", "</s>", "\n", "\x00", "日本 a", "😀"]
SUMS = ["12+34=", "7", "99-1=", "1 2", "<s>1+1=", "", "</s>", "é", "x" * 100]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return imported("transformers", "transformers is not installed")


def write_tokenizer(folder: Path, **fields: Any) -> None:
    """A tokenizer that starts each text with <s>, and recognizes <s> and </s>."""
    vocabulary = {word: at for at, word in enumerate(WORDS)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    named = tokenizer_json(
        WORDS[:2], pre_tokenizer={"type": "WhitespaceSplit"}, model=model, **fields
    )
    (folder / "tokenizer.json").write_text(json.dumps(named))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def forbid(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """Make the long way fail."""

    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("the long way was taken")

    monkeypatch.setattr(tokenizer, "encode", encode)


@pytest.mark.parametrize("model", ["adder", "subtractor"])
def test_the_example_models_tokenize_texts_as_before(
    transformers: Any, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / model)
    expected = [tokenizer.encode(text) for text in SUMS]
    forbid(monkeypatch, tokenizer)
    encode = text_encoder(tokenizer)

    assert [encode(text) for text in SUMS] == expected


def test_vllms_own_tokenizer_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM wraps it in classes of its own."""
    hf = imported("vllm.tokenizers.hf", "vLLM is not installed")
    tokenizer = hf.CachedHfTokenizer.from_pretrained(str(MODELS / "adder"))
    pooled = getattr(hf, "maybe_make_thread_pool", lambda kept: kept)(tokenizer)
    expected = [pooled.encode(text) for text in SUMS]
    forbid(monkeypatch, pooled)
    encode = text_encoder(pooled)

    assert [encode(text) for text in SUMS] == expected


def test_the_end_token_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a vLLM tokenizer, which computes its end token at each access
    hf = imported("vllm.tokenizers.hf", "vLLM is not installed")
    tokenizer = hf.CachedHfTokenizer.from_pretrained(str(MODELS / "adder"))
    pooled = getattr(hf, "maybe_make_thread_pool", lambda kept: kept)(tokenizer)
    expected = pooled.eos_token_id

    remember_end_token(pooled)

    # I expect it to be known from now on.
    monkeypatch.setattr(pooled, "convert_tokens_to_ids", None)
    assert (pooled.eos_token_id, pooled.eos_token) == (expected, tokenizer.eos_token)


def test_an_end_token_that_its_class_computes_stays_a_property() -> None:
    class Own:
        eos_token_id = 7

    remember_end_token(own := Own())

    Own.eos_token_id = 8
    assert own.eos_token_id == 8


def test_a_tokenizer_without_an_end_token_has_none(transformers: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    remember_end_token(tokenizer)

    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize("splits", [False, True])
def test_special_tokens_are_added_and_recognized_as_before(
    transformers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, splits: bool
) -> None:
    write_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=splits)
    expected = [tokenizer.encode(text) for text in TEXTS]
    again = transformers.AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=splits)
    forbid(monkeypatch, again)
    encode = text_encoder(again)

    assert expected[0] == [0, 3, 4]
    assert [encode(text) for text in TEXTS] == expected


@pytest.mark.parametrize(
    "fields",
    [
        {
            "truncation": {
                "max_length": 2,
                "stride": 0,
                "strategy": "LongestFirst",
                "direction": "Right",
            }
        },
        {
            "padding": {
                "strategy": {"Fixed": 8},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 2,
                "pad_type_id": 0,
                "pad_token": "<unk>",
            }
        },
    ],
    ids=["truncation", "padding"],
)
def test_truncation_and_padding_of_a_tokenizer_do_not_apply(
    transformers: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    write_tokenizer(tmp_path, **fields)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)

    assert text_encoder(tokenizer)("a b a b") == [0, 3, 4, 3, 4]


def test_a_class_with_its_own_encoding_keeps_it(transformers: Any, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    known = type(transformers.AutoTokenizer.from_pretrained(tmp_path))

    class Own(known):  # type: ignore[misc, valid-type]
        def _encode_plus(self, text: str, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(text.upper().lower() + " b", *args, **kwargs)

    assert text_encoder(Own.from_pretrained(tmp_path))("a") == [0, 3, 4]


def test_a_tokenizer_without_a_fast_version_encodes_by_itself() -> None:
    class Slow:
        def encode(self, text: str) -> list[int]:
            return [len(text)]

    assert text_encoder(Slow())("abc") == [3]
