"""Llamas of a real size in bf16, with random weights and answers that can be calculated.

They compute as any other does, on random numbers. But what attention and MLP add to a token is
small beside the token itself, and the last matrix knows each token's successor: the answer to a
prompt goes on counting from its last token, by a margin that no rounding and no batch reaches.
Their tokens are the words w0, w1, ...
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

#: Where models stay from one run to the next; without it they are written again for each run.
FOLDER: Final = "TOKENYARD_BENCH_MODELS"
#: Written last: a folder without it is half of a model.
_CONFIG: Final = "config.json"
#: Prompt and answer of the longest request.
MAX_TOKENS: Final = 640
_UTILIZATION: Final = 0.15
_WRITE_TIMEOUT_S: Final = 400.0
#: No prompt ends so close to the last token that its answer would begin again at the first.
_LAST: Final = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a Llama is."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Of its KV cache, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.hidden // self.heads

    def answer(self, last: int, count: int) -> list[int]:
        """What it says behind a prompt with this last token, greedily."""
        return list(range(last + 1, last + 1 + count))

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Different random ones, the same in each run."""
        draw = random.Random(tokens)
        most = self.vocabulary - _LAST
        return [[draw.randrange(most) for _ in range(tokens)] for _ in range(count)]


#: As Llama 3.2 1B, but with an output matrix of its own, and Llama 3.1 8B.
SHAPES: Final[Mapping[str, Shape]] = {
    "1b": Shape("llama-1b", 2048, 16, 32, 8, 8192, 128_256),
    "8b": Shape("llama-8b", 4096, 32, 32, 8, 14_336, 128_256),
}


def shrunken(shape: Shape) -> Shape:
    """One that a CPU computes in no time, for a rehearsal."""
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
    """The folder that `FOLDER` names, or one that is gone afterwards."""
    if os.environ.get(FOLDER):
        folder = Path(os.environ[FOLDER]).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as temporary:
        yield Path(temporary)


def write_llama(shape: Shape, models: Path) -> Path:
    """The folder of this model, which is written where it is not there yet."""
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
    """How all sides of all benchmarks load it, so that they find what another has compiled.

    As vLLM does by itself, but for limits that it chooses by who asks, and for memory, which
    several engines share: the KV cache holds as many requests as run at once, of `MAX_TOKENS`
    each, and the utilization is only what must be free. Nobody has a prefix cache, since prompts
    come again.
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
    """One of whole words; nobody reads its text, but an HTTP server wants to have one."""
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
