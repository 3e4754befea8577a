"""Checks of chat messages before a chat template renders them, the same in every program.

The worker's vLLM parses the messages. It expects their form to be checked, and ignores some parts
that it cannot use; here that is an error, since the answer would belong to another chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.media import MODALITIES, check_media_part
from tokenyard.protocol.wire import PLAIN_CHAT, Request

#: Most levels of nested objects and arrays in any value for a chat template.
MAX_CHAT_DEPTH: Final = 64
#: Parts with text, by type, with the field that holds it.
TEXT_PARTS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
#: Parts without text, by type; a part with a field of such a name is one, too.
MEDIA_PARTS: Final = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_image",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)
#: Names that ``chat_template_kwargs`` must not set: they have fields of their own, or are not the
#: client's choice. A template is a program, so it comes from the model and never from a request.
RESERVED_KWARGS: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "kwargs",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
#: Roles whose messages need content; an assistant's may consist of tool calls alone.
_SPEAKING: Final = frozenset({"developer", "system", "tool", "user"})


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Refuse messages that are not in the format of OpenAI's API, or have unknown parts."""
    if not messages:
        raise InvalidRequest("messages", "is empty")
    _check_depth("messages", messages)
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidRequest(f"{where}.role", "must be a string")
        _check_content(f"{where}.content", role, message.get("content"))
        if role == "assistant" and message.get("tool_calls") is not None:
            _check_tool_calls(f"{where}.tool_calls", message["tool_calls"])


def check_chat(request: Request) -> None:
    """Refuse a request with messages, or values for the chat template, that it cannot take."""
    if request.messages is not None:
        check_messages(request.messages)
    if request.chat is not PLAIN_CHAT:
        for name in request.chat.chat_template_kwargs:
            if name in RESERVED_KWARGS:
                raise InvalidRequest(
                    f"chat_template_kwargs.{name}", "this name is reserved; leave it out"
                )
        for name in ("tools", "documents", "chat_template_kwargs"):
            _check_depth(name, getattr(request.chat, name) or [])
    if request.reasoning_parser_kwargs:
        _check_depth("reasoning_parser_kwargs", [request.reasoning_parser_kwargs])


def chat_texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    """The texts of messages that `check_messages` accepts, without those of tool calls."""
    for message in messages:
        content = message.get("content") or ()
        for part in (content,) if isinstance(content, str) else content:
            if isinstance(part, str):
                yield part
            elif field := TEXT_PARTS.get(part["type"]):
                yield part[field]


def _check_content(where: str, role: str, content: Any) -> None:
    if isinstance(content, str):
        return
    if content is None:
        if role in _SPEAKING:
            raise InvalidRequest(where, f"is missing; a message of role {role} needs one")
        return
    if not isinstance(content, list):
        raise InvalidRequest(where, "must be a string or an array of parts")
    for at, part in enumerate(content):
        _check_part(f"{where}[{at}]", part)


def _check_part(where: str, part: Any) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise InvalidRequest(where, "must be a string or an object with a type")
    kind = part.get("type")
    if isinstance(kind, str) and kind in MODALITIES and kind in part:
        check_media_part(where, kind, part)
        return
    media = [name for name in (kind, *part) if isinstance(name, str) and name in MEDIA_PARTS]
    if media:
        raise InvalidRequest(
            where, f"is of type {media[0]}; give text, image_url, audio_url or video_url"
        )
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidRequest(f"{where}.type", f"use one of {', '.join(TEXT_PARTS)}")
    if not isinstance(part.get(TEXT_PARTS[kind]), str):
        raise InvalidRequest(f"{where}.{TEXT_PARTS[kind]}", "must be a string")


def _check_tool_calls(where: str, calls: Any) -> None:
    if not isinstance(calls, list):
        raise InvalidRequest(where, "must be an array")
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise InvalidRequest(
                f"{where}[{at}]", "must be an object of type function with a function"
            )
        if not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}[{at}].function.name", "must be a string")
        _check_arguments(f"{where}[{at}].function.arguments", function.get("arguments"))


def _check_arguments(where: str, arguments: Any) -> None:
    """Check arguments: an object, its JSON, or nothing."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
            # JSON can escape half a character, which no tokenizer accepts.
            json.dumps(arguments, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(where, f"must be a JSON object: {error}") from None
    elif arguments is None or arguments == "":
        return
    if not isinstance(arguments, dict):
        raise InvalidRequest(where, "must be a JSON object")
    _check_depth(where, arguments)


def _check_depth(where: str, value: Any) -> None:
    """Refuse a value that is nested too deeply."""
    level = [value]
    for _ in range(MAX_CHAT_DEPTH):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for values in inside for one in values if type(one) in (dict, list)]
        if not level:
            return
    raise InvalidRequest(where, f"is nested more than {MAX_CHAT_DEPTH} deep")
