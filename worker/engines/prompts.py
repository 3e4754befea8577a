"""Text and chat messages to token ids, with the model's own tokenizer."""

from __future__ import annotations

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


def has_tokenizer(path: str) -> bool:
    """Whether a model comes with a tokenizer; one that is not a local folder is trusted to."""
    folder = Path(path)
    return not folder.is_dir() or any((folder / name).exists() for name in _TOKENIZER_FILES)


def prompt_tokens(request: Request, tokenizer: Any, max_model_len: int) -> list[int]:
    """The prompt of a request as token ids; ``tokenizer`` is a Hugging Face one, or None.

    Raises `InvalidRequest` where the text cannot be tokenized.
    """
    if request.tokens is not None:
        return unpack_tokens(request.tokens)
    field = "prompt" if request.prompt is not None else "messages"
    if tokenizer is None:
        raise InvalidRequest(field, "this model has no tokenizer; give tokens")
    if request.prompt is not None:
        return _encode(request.prompt, tokenizer, max_model_len)
    return _apply_chat_template(request.messages or [], tokenizer)


def _encode(text: str, tokenizer: Any, max_model_len: int) -> list[int]:
    """Text that is too long however it is cut is refused before a second is spent on it."""
    longest = getattr(tokenizer, "max_chars_per_token", None)
    if longest and len(text) > longest * max_model_len:
        raise InvalidRequest(
            "prompt",
            f"has {len(text)} characters, more than {max_model_len} tokens can hold",
        )
    tokens: list[int] = tokenizer.encode(text)
    return tokens


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
