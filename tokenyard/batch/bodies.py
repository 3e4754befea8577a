"""The bodies of OpenAI requests as vLLM takes them, in our words.

OpenAI's own parameters and those that vLLM's server adds are known; what cannot be done is
refused by name instead of being dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tokenyard.protocol.wire import ChatOptions

#: Fields that say nothing about the answer.
_IGNORED: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "return_token_ids",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
#: Fields that we know in one sense only.
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "stream": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
_PROMPTS: Final = frozenset({"messages", "prompt"})
#: Fields that are read here and do not go on by their names.
_TRANSLATED: Final = frozenset(
    {
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "model",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "top_logprobs",
    }
)
#: Options of a chat, which go on by their names.
_CHAT: Final = frozenset(ChatOptions.__struct_fields__)


class BadBody(ValueError):
    """A line asks for what cannot be done; ``code`` for programs, the message for people."""

    def __init__(self, message: str, code: str = "invalid_line") -> None:
        super().__init__(message)
        self.code = code


def body_options(
    form: Literal["chat", "completion"], body: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and sampling parameters of a body; raises `BadBody`.

    Parameters that we do not know stand among the sampling parameters, which the yard checks.
    """
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise BadBody("body.model: must be a text")
    options: dict[str, Any] = {"model": model} if model else {}
    params: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in _IGNORED or name in _PROMPTS or name in _TRANSLATED:
            continue
        if form == "chat" and name in _CHAT:
            options[name] = value
        elif name not in _ONLY:
            params[name] = value
        elif value not in _ONLY[name]:
            raise BadBody(f"body.{name}: is not supported in a batch", "unsupported_parameter")
    _translate_length(form, body, params)
    _translate_logprobs(form, body, params)
    _translate_format(body, params)
    if isinstance(params.get("logit_bias"), dict):
        params["logit_bias"] = biases(params["logit_bias"])
    _check_tool_choice(body)
    _translate_effort(body, options)
    return options, params


def _check_tool_choice(body: Mapping[str, Any]) -> None:
    """Tools are shown to the model; nobody here reads its calls out of the answer."""
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto") or (body.get("tools") and choice != "none"):
        raise BadBody(
            "body.tool_choice: tool calls are not parsed in a batch; with tools say "
            '"tool_choice": "none", and find the calls in the text',
            "unsupported_parameter",
        )


def _translate_effort(body: Mapping[str, Any], options: dict[str, Any]) -> None:
    """OpenAI's ``reasoning_effort`` as vLLM's server hands it to a chat template."""
    effort = body.get("reasoning_effort")
    if effort is None:
        return
    given = options.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise BadBody("body.chat_template_kwargs: must be an object")
    thinks = {"enable_thinking": effort != "none"}
    options["chat_template_kwargs"] = thinks | given | {"reasoning_effort": effort}


def _translate_length(form: str, body: Mapping[str, Any], params: dict[str, Any]) -> None:
    """A chat goes on to the end of the model's context where nothing else is said."""
    given = body.get("max_completion_tokens")
    given = body.get("max_tokens") if given is None else given
    if given is not None:
        params["max_tokens"] = given
    elif form == "chat":
        params["max_tokens"] = None


def _translate_logprobs(form: str, body: Mapping[str, Any], params: dict[str, Any]) -> None:
    """A number in a completion; in a chat a switch, and a number beside it."""
    asked, top = body.get("logprobs"), body.get("top_logprobs")
    if form == "completion":
        if asked is not None:
            params["logprobs"] = asked
    elif asked is True:
        params["logprobs"] = top or 0
    elif asked not in (None, False) or top:
        raise BadBody("body.logprobs: must be true or false, and true with top_logprobs")


def _translate_format(body: Mapping[str, Any], params: dict[str, Any]) -> None:
    """OpenAI's ``response_format`` as vLLM's ``structured_outputs``."""
    asked = body.get("response_format")
    if asked is None:
        return
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "json_object":
        params["structured_outputs"] = {"json_object": True}
    elif kind == "json_schema":
        outer = asked.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, dict) else None
        if not isinstance(schema, dict):
            raise BadBody("body.response_format.json_schema.schema: must be an object")
        params["structured_outputs"] = {"json": schema}
    elif kind != "text":
        raise BadBody("body.response_format.type: use text, json_object or json_schema")


def biases(given: Mapping[str, Any]) -> dict[int, Any]:
    """Token ids are texts where they are the names of a JSON object; raises `BadBody`."""
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as fault:
        raise BadBody("logit_bias: its keys must be token ids") from fault
