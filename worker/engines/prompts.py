"""Turns text to token ids with the model's tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tokenyard.protocol.errors import InvalidRequest

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
)
#: Methods that a tokenizer's class overrides to encode in its own way.
_WAYS: Final = ("encode", "encode_plus", "_encode_plus", "_batch_encode_plus")
#: Modules whose classes encode in the standard way.
_KNOWN: Final = ("transformers.tokenization_utils", "vllm.")

Encode = Callable[[str], list[int]]


def has_tokenizer(path: str) -> bool:
    """Whether a model has a tokenizer; assumed if ``path`` is not a local folder."""
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).exists() for name in _TOKENIZER_FILES)


def text_encoder(tokenizer: Any, *, add_special_tokens: bool = True) -> Encode:
    """A faster equivalent of ``tokenizer.encode``, with the same token ids.

    A fast tokenizer of Hugging Face spends most of its time outside its Rust tokenizer. So the
    Rust tokenizer is called directly, unless the class encodes in its own way or the Rust
    tokenizer truncates or pads, which `encode` would switch off.
    """
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None or _has_own_way(type(tokenizer)) or rust.truncation or rust.padding:
        if add_special_tokens:
            encode: Encode = tokenizer.encode
            return encode
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    if rust.encode_special_tokens != tokenizer.split_special_tokens:
        rust.encode_special_tokens = tokenizer.split_special_tokens  # as `encode` would
    if add_special_tokens:
        return lambda text: rust.encode(text).ids
    return lambda text: rust.encode(text, add_special_tokens=False).ids


def remember_end_token(tokenizer: Any) -> None:
    """Cache the id of the end token, which vLLM reads from the tokenizer for each request.

    Transformers computes this attribute each time, in 6 µs and more. A class that defines the
    attribute itself keeps its own way.
    """
    if hasattr(tokenizer, "__dict__") and not hasattr(type(tokenizer), "eos_token_id"):
        vars(tokenizer)["eos_token_id"] = tokenizer.eos_token_id


def _has_own_way(kind: type) -> bool:
    return any(
        name in vars(base) and not base.__module__.startswith(_KNOWN)
        for base in kind.__mro__
        for name in _WAYS
    )


def encode_text(
    field: str, text: str, tokenizer: Any, encode: Encode, max_model_len: int
) -> list[int]:
    """Token ids of a text; raises `InvalidRequest` if any tokenization would be too long."""
    longest = getattr(tokenizer, "max_chars_per_token", None)
    if longest and len(text) > longest * max_model_len:
        raise InvalidRequest(
            field, f"has {len(text)} characters, more than {max_model_len} tokens can hold"
        )
    return encode(text)
