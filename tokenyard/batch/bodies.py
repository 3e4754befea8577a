"""Translates the bodies of OpenAI requests to our options and vLLM's sampling parameters.

It knows OpenAI's parameters and those that vLLM's server adds. An unsupported one is refused by
name, not dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tokenyard.protocol.wire import ChatOptions

#: Fields that do not affect the answer.
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
#: Fields with their only supported values.
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
#: Fields that are translated here.
_TRANSLATED: Final = frozenset(
    {
        "cache_salt",
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
#: Options of a chat, passed on under their names.
_CHAT: Final = frozenset(ChatOptions.__struct_fields__)


class BadBody(ValueError):
    """A body is invalid; ``code`` is for programs, the message for people."""

    def __init__(self, message: str, code: str = "invalid_line") -> None:
        super().__init__(message)
        self.code = code


def body_options(
    form: Literal["chat", "completion"], body: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and sampling parameters of a body; raises `BadBody`.

    Unknown parameters are returned as sampling parameters, which the yard checks.
    """
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise BadBody("body.model: must be a string")
    options: dict[str, Any] = {"model": model} if model else {}
    if salt := body.get("cache_salt"):
        options["cache_salt"] = _text("cache_salt", salt)
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


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadBody(f"body.{name}: must be a string")
    return value


def _check_tool_choice(body: Mapping[str, Any]) -> None:
    """Tools are shown to the model, but tool calls are not parsed from its answer."""
    choice = body.get("tool_choice")
    if choice not in (None, "none", "auto") or (body.get("tools") and choice != "none"):
        raise BadBody(
            "body.tool_choice: tool calls are not parsed in a batch; with tools give "
            '"tool_choice": "none", and parse the calls from the text',
            "unsupported_parameter",
        )


def _translate_effort(body: Mapping[str, Any], options: dict[str, Any]) -> None:
    """OpenAI's ``reasoning_effort`` as vLLM's server passes it to a chat template."""
    effort = body.get("reasoning_effort")
    if effort is None:
        return
    given = options.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise BadBody("body.chat_template_kwargs: must be an object")
    thinks = {"enable_thinking": effort != "none"}
    options["chat_template_kwargs"] = thinks | given | {"reasoning_effort": effort}


def _translate_length(form: str, body: Mapping[str, Any], params: dict[str, Any]) -> None:
    """Without a limit, a chat may fill the model's context."""
    given = body.get("max_completion_tokens")
    given = body.get("max_tokens") if given is None else given
    if given is not None:
        params["max_tokens"] = given
    elif form == "chat":
        params["max_tokens"] = None


def _translate_logprobs(form: str, body: Mapping[str, Any], params: dict[str, Any]) -> None:
    """A number in a completion; in a chat a flag with ``top_logprobs`` as the number."""
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
    """Convert token ids from the keys of a JSON object to integers; raises `BadBody`."""
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise BadBody("logit_bias: its keys must be token ids") from error
