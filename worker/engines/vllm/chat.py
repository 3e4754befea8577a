"""Chat messages to token ids, as ``vllm.LLM.chat`` makes them: by the same functions of vLLM.

vLLM's renderer parses the messages, finds out in which form the model's chat template expects their
content (once for each template), and applies the template. docs/parity.md shows that the prompts
are the same, token by token.
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

#: vLLM has moved it from one module to another, but its renderer always knows it.
_NoTemplate: Final[type[Exception]] = vars(hf)["ChatTemplateResolutionError"]
#: Characters of a template's own words in an error.
_LONGEST_REASON: Final = 500


class ChatPrompts:
    """Makes the prompts of one model from chats."""

    def __init__(self, renderer: BaseRenderer[Any], max_model_len: int) -> None:
        self._renderer = renderer
        self._tokenizer = renderer.get_tokenizer()
        self._max_model_len = max_model_len
        # A chat template writes the special tokens itself.
        self._encode = text_encoder(self._tokenizer, add_special_tokens=False)
        self._tokenizes = is_mistral_tokenizer(self._tokenizer)  # while it renders
        self._tells_time = isinstance(renderer, hf.HfRenderer)

    def tokens(self, request: Request, accepted_ms: int) -> list[int]:
        """Token ids of a chat.

        A template that asks for the date is given that of ``accepted_ms`` (unix time, read as UTC),
        so that every attempt at a request has the same prompt. Raises `InvalidRequest` where the
        model has no chat template, or its template refuses the messages.
        """
        try:
            _, prompt = self._renderer.render_messages(
                _own_copy(request.messages or []), self._params(request, accepted_ms)
            )
        except _NoTemplate:
            raise InvalidRequest(
                "messages", "this model has no chat template; give prompt or tokens"
            ) from None
        except (
            Exception
        ) as error:  # a template is a program: on hostile messages it raises anything
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
        """As `LLM.chat` puts them together."""
        chat = request.chat
        given = dict(chat.chat_template_kwargs)
        if chat.documents is not None:
            given["documents"] = chat.documents
        if self._tells_time:  # other renderers have no templates that could ask
            given["strftime_now"] = _clock(accepted_ms)
        own = {
            "add_generation_prompt": chat.add_generation_prompt,
            "continue_final_message": chat.continue_final_message,
            "tools": chat.tools,
            "tokenize": self._tokenizes,
        }
        return ChatParams(chat_template_kwargs=merge_kwargs(given, own))


def _own_copy(messages: list[dict[str, Any]]) -> list[Any]:
    """The messages, to be changed: vLLM reads the arguments of tool calls in their place."""
    return [
        {**message, "tool_calls": copy.deepcopy(message["tool_calls"])}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _clock(unix_ms: int) -> Callable[[str], str]:
    """What a template calls as ``strftime_now``, at a time that does not go on."""
    return datetime.datetime.fromtimestamp(unix_ms / 1000, tz=datetime.UTC).strftime
