"""Text and chat messages to token ids, with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tokenyard.errors import InvalidRequest
from tokenyard.wire import Request, unpack_tokens

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


def text_encoder(tokenizer: Any) -> Encode:
    """What ``tokenizer.encode`` does with a text, on the shortest way to the same token ids.

    A fast tokenizer of Hugging Face spends most of its time around the Rust one within. That one
    is asked where nothing else has a say: neither a class that encodes in its own way, nor
    truncation or padding of the Rust one's own, which `encode` would switch off.
    """
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None or _has_own_way(type(tokenizer)) or rust.truncation or rust.padding:
        encode: Encode = tokenizer.encode
        return encode
    if rust.encode_special_tokens != tokenizer.split_special_tokens:
        rust.encode_special_tokens = tokenizer.split_special_tokens  # as `encode` would
    return lambda text: rust.encode(text).ids


def remember_end_token(tokenizer: Any) -> None:
    """Have the end token at hand that vLLM asks its tokenizer for with each request.

    Transformers works it out each time anew, for 6 µs and more, since it is an attribute that is
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


def prompt_tokens(
    request: Request, tokenizer: Any, encode: Encode | None, max_model_len: int
) -> list[int]:
    """The prompt of a request as token ids.

    ``tokenizer`` is a Hugging Face one with its `text_encoder`, or None. Raises `InvalidRequest`
    where the text cannot be tokenized.
    """
    if request.tokens is not None:
        return unpack_tokens(request.tokens)
    field = "prompt" if request.prompt is not None else "messages"
    if tokenizer is None or encode is None:
        raise InvalidRequest(field, "this model has no tokenizer; give tokens")
    if request.prompt is not None:
        _check_length(request.prompt, tokenizer, max_model_len)
        return encode(request.prompt)
    return _apply_chat_template(request.messages or [], tokenizer)


def _check_length(text: str, tokenizer: Any, max_model_len: int) -> None:
    """Text that is too long however it is cut is refused before a second is spent on it."""
    longest = getattr(tokenizer, "max_chars_per_token", None)
    if longest and len(text) > longest * max_model_len:
        raise InvalidRequest(
            "prompt",
            f"has {len(text)} characters, more than {max_model_len} tokens can hold",
        )


def _apply_chat_template(messages: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    try:
        tokens: list[int] = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as fault:  # a template is a program: on hostile messages it raises anything
        raise InvalidRequest(
            "messages", f"the chat template does not take them: {str(fault)[:500]}"
        ) from fault
    return tokens
