"""Small models with random weights for each task that pools."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

Kind = Literal["bert", "cross", "labels", "colbert", "qwen_embed", "qwen_rank", "reward"]
#: The engine arguments of a kind, where vLLM cannot tell what it is for.
ENGINE_ARGS: Final[Mapping[Kind, dict[str, Any]]] = MappingProxyType(
    {
        "bert": {},
        "cross": {},
        "labels": {},
        "colbert": {"runner": "pooling", "pooler_config": {"task": "token_embed"}},
        "qwen_embed": {"runner": "pooling"},
        "qwen_rank": {"runner": "pooling"},
        "reward": {"runner": "pooling", "pooler_config": {"task": "token_classify"}},
    }
)
WIDTH: Final = 128
#: How much larger weights are than usual, so that the answers to two inputs differ.
_SCALE: Final = 4.0
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_UNKNOWN: Final = {"unk_token": "[UNK]"}
_NAMED: Final = {
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "eos_token": "[SEP]",
    **_UNKNOWN,
}
_LETTERS: Final = string.ascii_lowercase + string.digits


def write_pooling_model(kind: Kind, folder: Path) -> Path:
    """Write a model into a new folder, and return the folder."""
    import torch

    torch.manual_seed(1)
    if kind in ("bert", "cross", "labels", "colbert"):
        model, end = _bert(kind), 0
    else:
        model, end = _decoder(kind), 3
    enlarge_weights(model)
    model.float().save_pretrained(folder)
    _tokenizer(is_bert=not end).save_pretrained(folder)
    if kind == "reward":
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["Qwen2ForTokenClassification"]
        (folder / "config.json").write_text(json.dumps(config))
    if kind in ("bert", "qwen_embed"):
        _write_pooling(folder, "mean" if kind == "bert" else "lasttoken")
    return folder


def enlarge_weights(model: Any) -> None:
    """Multiply the random weights of a model, so that it tells inputs apart."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "norm" not in name and "position" not in name:
                weight.mul_(_SCALE)


def _bert(kind: Kind) -> Any:
    import transformers

    shape = {
        "vocab_size": len(_words()),
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": WIDTH,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    if kind in ("bert", "colbert"):
        return transformers.BertModel(transformers.BertConfig(**shape))
    labels = 1 if kind == "cross" else 3
    config = transformers.BertConfig(**shape, num_labels=labels)
    return transformers.BertForSequenceClassification(config)


def _decoder(kind: Kind) -> Any:
    import transformers

    shape = {
        "vocab_size": len(_words()),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 3,
    }
    if kind == "qwen_embed":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=32))
    if kind == "qwen_rank":
        config = transformers.Qwen3Config(**shape, head_dim=32, num_labels=1)
        return transformers.Qwen3ForSequenceClassification(config)
    return transformers.Qwen2ForTokenClassification(transformers.Qwen2Config(**shape, num_labels=2))


def _words() -> list[str]:
    return [*_SPECIAL, *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]


def _tokenizer(*, is_bert: bool) -> Any:
    """One token for each letter."""
    import tokenizers
    import transformers

    vocabulary = {word: number for number, word in enumerate(_words())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, **_UNKNOWN))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    if is_bert:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    names = ["input_ids", "token_type_ids", "attention_mask"] if is_bert else ["input_ids"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **_NAMED,
        model_input_names=names,
    )


def _write_pooling(folder: Path, mode: str) -> None:
    """The files of sentence-transformers from which vLLM learns how to pool."""
    library = "sentence_transformers.models"
    names = ("Transformer", "Pooling", "Normalize")
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{name}" if number else "",
            "type": f"{library}.{name}",
        }
        for number, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = (
        {f"pooling_mode_{mode}": True}
        if mode == "lasttoken"
        else {"pooling_mode_mean_tokens": True}
    )
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": WIDTH, **pooling})
    )
