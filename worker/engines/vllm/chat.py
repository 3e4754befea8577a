"""Turns chat messages to token ids, with the same functions as ``vllm.LLM.chat``.

vLLM's renderer parses the messages, detects the form of content that the model's chat template
expects (once per template), and applies the template. docs/parity.md shows that the prompts are the
same, token by token.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable
from typing import Any, Final, cast

from vllm.renderers import BaseRenderer, ChatParams, hf, merge_kwargs
from vllm.utils.mistral import is_mistral_tokenizer

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import Request
from worker.engines.prompts import encode_text, text_encoder

#: vLLM has moved it between modules, but `hf` always has it.
_NoTemplate: Final[type[Exception]] = vars(hf)["ChatTemplateResolutionError"]
#: Characters of a template's error message in ours.
_LONGEST_REASON: Final = 500


class ChatPrompts:
    """Makes the prompts of one model from chats."""

    def __init__(self, renderer: BaseRenderer[Any], max_model_len: int) -> None:
        self._renderer = renderer
        self._tokenizer = renderer.get_tokenizer()
        self._max_model_len = max_model_len
        # The chat template adds the special tokens.
        self._encode = text_encoder(self._tokenizer, add_special_tokens=False)
        self._tokenizes = is_mistral_tokenizer(self._tokenizer)  # while rendering
        self._tells_time = isinstance(renderer, hf.HfRenderer)

    def tokens(self, request: Request, accepted_ms: int) -> list[int]:
        """Token ids of a chat.

        A template that asks for the date gets that of ``accepted_ms`` (Unix time in ms, shown in
        UTC), so that every attempt has the same prompt. Raises `InvalidRequest` if the model has no
        chat template, or if the template refuses the messages.
        """
        try:
            _, prompt = self._renderer.render_messages(
                _own_copy(request.messages or []), self._params(request, accepted_ms)
            )
        except _NoTemplate:
            raise InvalidRequest(
                "messages", "this model has no chat template; give prompt or tokens"
            ) from None
        except Exception as error:  # a template is a program and can raise anything
            reason = str(error)[:_LONGEST_REASON].encode(errors="backslashreplace").decode()
            raise InvalidRequest(
                "messages", f"the chat template does not take them: {reason}"
            ) from error
        rendered = cast("dict[str, Any]", prompt)
        if "prompt_token_ids" in rendered:
            return list(rendered["prompt_token_ids"])
        try:
            return encode_text(
                "messages", rendered["prompt"], self._tokenizer, self._encode, self._max_model_len
            )
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("messages", "what the chat template makes is no text") from error

    def _params(self, request: Request, accepted_ms: int) -> ChatParams:
        """The parameters for vLLM's renderer, as `LLM.chat` makes them."""
        chat = request.chat
        given = dict(chat.chat_template_kwargs)
        if chat.documents is not None:
            given["documents"] = chat.documents
        if self._tells_time:  # other renderers have no templates
            given["strftime_now"] = _clock(accepted_ms)
        own = {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "tools": chat.tools,
            "tokenize": self._tokenizes,
        }
        return ChatParams(chat_template_kwargs=merge_kwargs(given, own))


def _own_copy(messages: list[dict[str, Any]]) -> list[Any]:
    """A copy that vLLM may change: it parses the arguments of tool calls in place."""
    return [
        {**message, "tool_calls": copy.deepcopy(message["tool_calls"])}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _clock(unix_ms: int) -> Callable[[str], str]:
    """The function ``strftime_now`` of templates, at a fixed time."""
    return datetime.datetime.fromtimestamp(unix_ms / 1000, tz=datetime.UTC).strftime
