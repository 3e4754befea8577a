"""A tiny model that can say anything: a token for each byte, a chat template, and random weights.

Left alone it writes `CYCLE` for ever, from the letter behind the last one of its prompt. What
follows any other byte is arbitrary, but always the same. Bound by a grammar it prefers letters to
quotes and quotes to blanks, so every string needs a `maxLength` and every JSON value comes to an
end.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Final

from tests.engines.chats import byte_letters

#: With letters of two, three and four bytes.
CYCLE: Final = string.ascii_lowercase + string.ascii_uppercase + string.digits + "é€😀"
MAX_LEN: Final = 1024
_SPECIAL: Final = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
_WIDTH: Final = 256
_HEAD: Final = 64
_SCALE: Final = 8.0
_BYTE_LEVEL: Final = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
#: Generation goes on behind the last letter that the user has said.
_TEMPLATE: Final = """\
{%- if tools %}{{ '<|im_start|>system\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if messages and messages[-1].content is string %}{{ messages[-1].content[-1:] }}{% endif %}
{%- endif %}"""


def token_of(byte: int) -> int:
    """The token of a byte."""
    return len(_SPECIAL) + byte


def text_behind(prompt: str, bytes_: int) -> str:
    """The whole letters that the model writes behind a letter of `CYCLE`."""
    cycle = CYCLE.encode()
    start = cycle.index(prompt.encode()[-1]) + 1
    return bytes(cycle[(start + at) % len(cycle)] for at in range(bytes_)).decode(errors="ignore")


def write_speaker(folder: Path) -> Path:
    """Write the model into a new folder, and return the folder; under a MiB and a second."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    size = len(_SPECIAL) + 256
    random = torch.Generator().manual_seed(0)

    def signs(rows: int) -> torch.Tensor:
        return torch.randint(0, 2, (rows, _WIDTH), generator=random) * 2.0 - 1.0

    def noise(rows: int, columns: int) -> torch.Tensor:
        return 0.002 * torch.randn(rows, columns, generator=random)

    embedded = signs(size)
    embedded[:, 0] = 1.0  # by which the head adds a bias
    head = signs(size) / _WIDTH
    cycle = [token_of(byte) for byte in CYCLE.encode()]
    for before, after in zip([cycle[-1], *cycle[:-1]], cycle, strict=True):
        head[after] = embedded[before] / _WIDTH
    head *= _SCALE
    head[:, 0] = torch.tensor([_bias(token, cycle) for token in range(size)])
    tensors = {
        "model.embed_tokens.weight": embedded,
        "model.norm.weight": torch.ones(_WIDTH),
        "lm_head.weight": head,
    }
    at = "model.layers.0"
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{at}.{name}.weight"] = torch.ones(_WIDTH)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"{at}.self_attn.{name}.weight"] = noise(_WIDTH, _WIDTH)
    for name in ("gate_proj", "up_proj"):
        tensors[f"{at}.mlp.{name}.weight"] = noise(_WIDTH, _WIDTH)
    tensors[f"{at}.mlp.down_proj.weight"] = noise(_WIDTH, _WIDTH)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, value in _files(size).items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def _bias(token: int, cycle: list[int]) -> float:
    if token in cycle:
        return 0.0
    if token == _SPECIAL.index("</s>"):
        return -10.0  # as soon as a grammar allows it
    if token < len(_SPECIAL) or token - len(_SPECIAL) in b" \t\n\r\v\f":
        return -60.0
    return -20.0


def _files(size: int) -> dict[str, Any]:
    vocabulary = {word: at for at, word in enumerate((*_SPECIAL, *byte_letters()))}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": at, "content": word, "special": True} | flags for at, word in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": _TEMPLATE,
        "model_max_length": MAX_LEN,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": _WIDTH // _HEAD,
        "num_key_value_heads": _WIDTH // _HEAD,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "vocab_size": size,
        "max_position_embeddings": MAX_LEN,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    return {"tokenizer": tokenizer, "tokenizer_config": names, "config": config}
