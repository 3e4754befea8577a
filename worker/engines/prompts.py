"""Text to token ids, with the model's own tokenizer."""

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
#: What a tokenizer's class would have of its own if it encoded in a way of its own.
_WAYS: Final = ("encode", "encode_plus", "_encode_plus", "_batch_encode_plus")
#: Where the classes come from whose ways are known.
_KNOWN: Final = ("transformers.tokenization_utils", "vllm.")

Encode = Callable[[str], list[int]]


def has_tokenizer(path: str) -> bool:
    """Whether a model comes with a tokenizer; one that is not a local folder is trusted to."""
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).exists() for name in _TOKENIZER_FILES)


def text_encoder(tokenizer: Any, *, add_special_tokens: bool = True) -> Encode:
    """What ``tokenizer.encode`` does with a text, on the shortest way to the same token ids.

    A fast tokenizer of Hugging Face spends most of its time around the Rust one within. That one
    is asked where nothing else has a say: neither a class that encodes in its own way, nor
    truncation or padding of the Rust one's own, which `encode` would switch off.
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
    """Have the end token at hand that vLLM asks its tokenizer for with each request.

    Transformers works it out again each time, for 6 µs and more, since it is an attribute that is
    not found. So one that is there is taken; a class that has its own way keeps it.
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
    """Token ids of a text; raises `InvalidRequest` where it is too long however it is cut."""
    longest = getattr(tokenizer, "max_chars_per_token", None)
    if longest and len(text) > longest * max_model_len:
        raise InvalidRequest(
            field, f"has {len(text)} characters, more than {max_model_len} tokens can hold"
        )
    return encode(text)
