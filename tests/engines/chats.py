"""Chats to compare, and models without weights whose templates render them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

TEMPLATES: Final = Path(__file__).parent / "chat_templates"
#: In the table's order. Each is written in the style of its family; none is a copy.
STYLES: Final[Mapping[str, str]] = {
    "llama-3": "Llama 3.1 to 3.3",
    "llama-4": "Llama 4",
    "qwen-2.5": "Qwen 2.5",
    "qwen-3": "Qwen 3",
    "hermes": "Hermes",
    "gemma-2": "Gemma 2",
    "gemma-3": "Gemma 3",
    "mistral": "Mistral",
    "gpt-oss": "GPT-OSS",
    "command-r": "Command R",
}
#: Each is one token that at least one of the templates writes.
_SPECIAL: Final = (
    "<s>",
    "</s>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|header_start|>",
    "<|eot|>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|START_OF_TURN_TOKEN|>",
)

_BYTE_LEVEL: Final = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}

FUNCTION: Final[dict[str, Any]] = {
    "name": "get_weather",
    "description": "The weather somewhere",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {}}},
        "required": ["city"],
    },
}
TOOLS: Final = [{"type": "function", "function": FUNCTION}]


@dataclass(frozen=True, slots=True)
class Case:
    """A chat. ``shown`` are texts that a template writes into the prompt if it supports them."""

    messages: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content, **more}


def part(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "text", "text": text}


def call(arguments: Any) -> dict[str, Any]:
    """A tool call."""
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "abcdef123", "type": "function", "function": function}


_USER: Final = say("user", "Überall 日本 😀?")
_RESULT: Final = say("tool", '{"sky": "blüe"}', tool_call_id="abcdef123", name="get_weather")
_OPEN: Final = {"add_generation_prompt": False, "continue_final_message": True}
_DOCUMENTS: Final = [{"title": "Atlas", "text": "Rivers"}, {"title": "Almanac", "text": "Tides"}]

#: By column of the table: all chats of a column are of this kind.
CASES: Final[Mapping[str, list[Case]]] = {
    "plain": [
        Case([_USER], shown=("Überall 日本 😀?",)),
        Case([_USER, say("assistant", " Yes. "), say("user", "<s>Why</s>")], shown=("Yes.", "Why")),
        Case([_USER], {"add_generation_prompt": False}, ("Überall",)),
        Case([say("user", "")]),
    ],
    "system": [
        Case([say("system", "Be brief."), _USER], shown=("Be brief.", "Überall")),
        Case([say("developer", "Be kind."), _USER], shown=("Be kind.", "Überall")),
    ],
    "parts": [
        Case([say("user", [part("One"), part("Two")])], shown=("One", "Two")),
        Case([say("user", ["One", {"type": "input_text", "text": "Two"}])], shown=("One", "Two")),
        Case([say("user", [part("One")]), say("assistant", [part("Two")]), _USER], shown=("Two",)),
        Case([say("user", [])]),
    ],
    "system parts": [
        Case([say("system", [part("Be brief."), part("And kind.")]), _USER], shown=("Be brief.",)),
    ],
    "tools": [
        Case([_USER], {"tools": TOOLS}, ("get_weather",)),
        Case([say("system", "Be brief."), _USER], {"tools": TOOLS}, ("get_weather", "Be brief.")),
        Case([_USER], {"tools": []}, ("Überall",)),
    ],
    "tool calls": [
        Case([_USER, say("assistant", "", tool_calls=[call(arguments)]), _RESULT], {"tools": TOOLS},
             ("get_weather", "Kiew" if "Kiew" in str(arguments) else "", "blüe"))
        for arguments in ('{"city": "Kiew", "days": [1]}', {"city": "Kiew"}, "{}", "", None)
    ],
    "tool result in parts": [
        Case(
            [_USER, say("assistant", "", tool_calls=[call("{}")]),
             say("tool", [part("One"), part("Two")], tool_call_id="abcdef123")],
            {"tools": TOOLS},
            ("One", "Two"),
        ),
    ],
    "null content": [
        Case([_USER, say("assistant", None, tool_calls=[call('{"city": "Kiew"}')]), _RESULT],
             {"tools": TOOLS}, ("Kiew",)),
        Case([_USER, {"role": "assistant", "tool_calls": [call("{}")]}, _RESULT],
             {"tools": TOOLS}, ("get_weather",)),
        Case([_USER, say("assistant", None), say("user", "Again")], shown=("Again",)),
        Case([_USER, say("assistant", "Yes.", tool_calls=[]), say("user", "Why")], shown=("Yes.",)),
    ],
    "continued": [
        Case([_USER, say("assistant", "It is ")], _OPEN, ("It is",)),
        Case([_USER, say("assistant", [part("It is")])], _OPEN, ("It is",)),
    ],
    "kwargs": [
        Case([_USER], {"chat_template_kwargs": {"enable_thinking": False}}, ("Überall",)),
        Case([_USER], {"chat_template_kwargs": {"enable_thinking": True}}, ("Überall",)),
        Case([_USER], {"chat_template_kwargs": {"reasoning_effort": "high", "unknown": [1]}},
             ("Überall",)),
        Case([_USER], {"chat_template_kwargs": {"date_string": "1 Jan 2000"}}, ("Überall",)),
    ],
    "documents": [Case([_USER], {"documents": _DOCUMENTS}, ("Atlas", "Tides"))],
    "reasoning": [
        Case([_USER, say("assistant", "Yes.", reasoning="Because."), say("user", "Why")],
             shown=("Yes.",)),
        Case([_USER, say("assistant", "<think>\nHm\n</think>\n\nYes."), say("user", "Why")],
             shown=("Yes.",)),
    ],
}  # fmt: skip

#: The worker refuses these and `LLM.chat` does not; with what `LLM.chat` does instead.
STRICTER: Final[Mapping[str, tuple[Case, str]]] = {
    "`content` null or missing in a message of role user, system, developer or tool": (
        Case([say("user", None)]),
        "takes it as empty",
    ),
    "a text part without text": (
        Case([say("user", [{"type": "text", "text": None}, part("One")])]),
        "leaves the part out",
    ),
    "`arguments` of a tool call that are no JSON": (
        Case([_USER, say("assistant", "", tool_calls=[call("{")]), _RESULT]),
        "takes them as empty",
    ),
    "`arguments` of a tool call that are JSON, but no object": (
        Case([_USER, say("assistant", "", tool_calls=[call("[1]")]), _RESULT]),
        "takes them as empty",
    ),
    "names in `chat_template_kwargs` that would replace what the system says": (
        Case([_USER], {"chat_template_kwargs": {"messages_": 1, "raise_exception": 1}}),
        "gives them to the template",
    ),
}

#: Both refuse these, whatever the template.
REFUSED: Final[Mapping[str, Case]] = {
    "image": Case([say("user", [{"type": "image_url", "image_url": {"url": "data:,"}}])]),
    "audio": Case([say("user", [{"type": "input_audio", "input_audio": {"data": ""}}])]),
    "unknown part": Case([say("user", [{"type": "smell", "smell": "rose"}])]),
    "part without a type": Case([say("user", [{"text": "One"}])]),
    "tool call of another type": Case(
        [_USER, say("assistant", "", tool_calls=[{"type": "custom", "custom": {}}])]
    ),
    "generation prompt and continuation": Case(
        [_USER, say("assistant", "x")],
        {"add_generation_prompt": True, "continue_final_message": True},
    ),
}  # fmt: skip


def write_model(folder: Path, style: str | None) -> Path:
    """Write a model without weights; its tokenizer has a token for each byte and loses nothing."""
    vocabulary = {word: at for at, word in enumerate((*_SPECIAL, *byte_letters()))}
    named = tokenizer_json(
        _SPECIAL,
        pre_tokenizer=_BYTE_LEVEL,
        decoder=_BYTE_LEVEL,
        model={"type": "BPE", "vocab": vocabulary, "merges": []},
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if style is not None:
        config["chat_template"] = (TEMPLATES / f"{style}.jinja").read_text(encoding="utf-8")
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    files = {"tokenizer": named, "tokenizer_config": config, "config": model}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def tokenizer_json(special: Sequence[str], **fields: Any) -> dict[str, Any]:
    """A tokenizer that starts each text with <s>: one tokenized twice would have it twice."""
    begins = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    unset = dict.fromkeys(("truncation", "padding", "normalizer", "decoder"))
    return unset | {
        "version": "1.0",
        "added_tokens": [
            {"id": at, "content": word, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for at, word in enumerate(special)
        ],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begins, first],
            "pair": [begins, first, second],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        **fields,
    }


def byte_letters() -> list[str]:
    """The letters with which a byte-level tokenizer writes the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
