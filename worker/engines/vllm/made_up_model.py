"""A made-up model that each process runs once in its warm-up.

It is small but complete: weights, a tokenizer, and requests with the features of real ones. So a
process loads all that its first model needs before it counts as warm.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from tokenyard.protocol.wire import Assignment, Request, SamplingParams
from worker.models import ModelSpec

_WIDTH: Final = 128
_INNER: Final = 256
_SPECIAL: Final = ("<pad>", "<s>", "</s>", "<unk>")
_WORDS: Final = (*_SPECIAL, *string.ascii_lowercase)
_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": len(_WORDS),
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOKENIZER_CONFIG: Final = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "chat_template": "{{ messages[-1]['content'] }}",
}
_BATCH: Final = 64


def write_model(folder: Path) -> ModelSpec:
    """Write the model's files to a folder; returns the spec to load it."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG))
    save_file(dict(_weights()), folder / "model.safetensors", {"format": "pt"})
    return ModelSpec(
        name="made-up",
        path=str(folder),
        max_num_seqs=_BATCH,
        enforce_eager=True,
        kv_cache_gib=1 / 32,
        sleep_level=0,
    )


def requests() -> list[Assignment]:
    """A batch with all kinds: text and messages, greedy and sampled, streaming and not."""
    kinds = (
        SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0),
        SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=4, ignore_eos=True, top_p=0.9, top_k=5, seed=1),
        SamplingParams(max_tokens=4, ignore_eos=True, stop=["zz"], presence_penalty=0.5),
    )
    return [_assignment(number, kinds[number % len(kinds)]) for number in range(_BATCH)]


def _assignment(number: int, params: SamplingParams) -> Assignment:
    prompt = {"prompt": "abc"} if number % 3 else {"messages": [{"role": "user", "content": "a"}]}
    request = Request(id=f"made-up-{number}", **prompt, params=params, stream=number % 2 == 0)
    return Assignment(request=request, entry=f"{number}-0", sid="normal/0-0", attempt=1)


def _tokenizer() -> Tokenizer:
    """One token for each letter."""
    vocabulary = {word: number for number, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, "<unk>"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    return tokenizer


def _weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Weights of a Llama with one layer, all with the same value: nothing reads the output."""
    vocabulary = len(_WORDS)
    shapes = {
        "model.embed_tokens": (vocabulary, _WIDTH),
        "model.layers.0.input_layernorm": (_WIDTH,),
        "model.layers.0.self_attn.q_proj": (_WIDTH, _WIDTH),
        "model.layers.0.self_attn.k_proj": (_WIDTH, _WIDTH),
        "model.layers.0.self_attn.v_proj": (_WIDTH, _WIDTH),
        "model.layers.0.self_attn.o_proj": (_WIDTH, _WIDTH),
        "model.layers.0.post_attention_layernorm": (_WIDTH,),
        "model.layers.0.mlp.gate_proj": (_INNER, _WIDTH),
        "model.layers.0.mlp.up_proj": (_INNER, _WIDTH),
        "model.layers.0.mlp.down_proj": (_WIDTH, _INNER),
        "model.norm": (_WIDTH,),
        "lm_head": (vocabulary, _WIDTH),
    }
    for name, shape in shapes.items():
        yield f"{name}.weight", torch.full(shape, 0.01)
