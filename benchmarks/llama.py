"""Llamas of any size in bf16, with random weights and predictable answers.

They compute like any other Llama, on random numbers. But attention and MLP add little to a token's
embedding, and the output matrix maps each token to its successor: the answer counts on from the
prompt's last token, by a margin that neither rounding nor batching reaches. The tokens are the
words w0, w1, ...
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.child import run_child
from worker.models import ModelSpec

#: Variable that names a folder to keep models in; without it, each run writes them again.
FOLDER: Final = "TOKENYARD_BENCH_MODELS"
#: Written last: a folder without it is incomplete.
_CONFIG: Final = "config.json"
#: Tokens of the longest request, prompt plus answer.
MAX_TOKENS: Final = 640
_UTILIZATION: Final = 0.15
_WRITE_TIMEOUT_S: Final = 400.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a Llama."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.hidden // self.heads

    def answer(self, last: int, count: int) -> list[int]:
        """The greedy answer, of ``count`` tokens, to a prompt that ends with token ``last``."""
        return [(last + 1 + at) % self.vocabulary for at in range(count)]

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Distinct random prompts, the same in each run."""
        draw = random.Random(tokens)
        return [[draw.randrange(self.vocabulary) for _ in range(tokens)] for _ in range(count)]


#: The shapes of Llama 3.2 1B, but with its own output matrix, and Llama 3.1 8B.
SHAPES: Final[Mapping[str, Shape]] = {
    "1b": Shape("llama-1b", 2048, 16, 32, 8, 8192, 128_256),
    "8b": Shape("llama-8b", 4096, 32, 32, 8, 14_336, 128_256),
}


def shrunken(shape: Shape) -> Shape:
    """A shape small enough for a rehearsal on a CPU."""
    return replace(
        shape,
        name=f"{shape.name}-shrunken",
        hidden=128,
        layers=2,
        heads=2,
        kv_heads=1,
        inner=256,
        vocabulary=2048,
    )


@contextmanager
def models_folder() -> Iterator[Path]:
    """The folder that `FOLDER` names, or a temporary one."""
    if os.environ.get(FOLDER):
        folder = Path(os.environ[FOLDER]).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as temporary:
        yield Path(temporary)


def write_llama(shape: Shape, models: Path) -> Path:
    """Write the model unless it exists; returns its folder."""
    folder = models / shape.name
    if not (folder / _CONFIG).exists():
        folder.mkdir(exist_ok=True)
        words = (f"w{number}" for number in range(shape.vocabulary))
        write_tokenizer(words, "w0", folder)
        arguments = [json.dumps(asdict(shape)), str(folder)]
        run_child("benchmarks.llama_weights", arguments, timeout_s=_WRITE_TIMEOUT_S)
        (folder / _CONFIG).write_text(json.dumps(_config(shape)))
    return folder


def model_spec(shape: Shape, path: Path, max_num_seqs: int, *, gpu: bool) -> ModelSpec:
    """The spec for all sides of all benchmarks, so that they share compiled code.

    It has vLLM's defaults, except for limits that vLLM chooses by the kind of program, and for
    memory, which several engines share: the KV cache holds ``max_num_seqs`` requests of
    `MAX_TOKENS` each, and the utilization is only the part that must be free. Prefix caches are
    off, because prompts repeat.
    """
    cache_gib = shape.kv_bytes_per_token * MAX_TOKENS * max_num_seqs / 1024**3
    arguments: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 8192}
    if gpu:
        arguments["gpu_memory_utilization"] = _UTILIZATION
    return ModelSpec(
        name=shape.name,
        path=str(path),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        enforce_eager=not gpu,
        kv_cache_gib=round(cache_gib + 0.25, 2),
        engine_args=arguments,
    )


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def write_tokenizer(words: Iterable[str], unknown: str, folder: Path) -> None:
    """Write a tokenizer of whole words, which an HTTP server requires."""
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": unknown,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unknown}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
