"""Parses the lines of an input file: each is a request or invalid.

A file may mix two forms: lines of the OpenAI batch API (``custom_id``, ``method``, ``url``,
``body``) and plain lines (``id``, one of ``prompt``, ``tokens`` and ``messages``, and parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from tokenyard.client.options import Prompt, SamplingOptions
from tokenyard.protocol.parse import BadJson, ForeignJson
from tokenyard.protocol.wire import ChatOptions

T = TypeVar("T")

#: The form of the answer; that of a row is ours.
Form = Literal["chat", "completion", "row"]

CHAT_URL: Final = "/v1/chat/completions"
COMPLETIONS_URL: Final = "/v1/completions"
_FORMS: Final[Mapping[str, Form]] = {CHAT_URL: "chat", COMPLETIONS_URL: "completion"}
_OPENAI_FIELDS: Final = frozenset({"custom_id", "method", "url", "body"})
_PROMPTS: Final = ("prompt", "tokens", "messages")
_TEXTS: Final = ("model", "session", "tenant", "cache_salt")
_PLAIN_OPTIONS: Final = frozenset({"params", "metadata", *_TEXTS})
#: Options of a chat.
_CHAT: Final = frozenset(ChatOptions.__struct_fields__)
_SAMPLING: Final = frozenset(SamplingOptions.__annotations__)

_decode = ForeignJson[dict[str, Any]](dict[str, Any]).decode


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """The request of a valid line."""

    custom_id: str
    form: Form
    prompt: Prompt
    options: dict[str, Any]  # fields of `SharedOptions`, without sampling parameters
    params: dict[str, Any]  # sampling parameters
    wants_tokens: bool = False  # the answer contains its token ids


@dataclass(frozen=True, slots=True)
class HttpLine:
    """A valid line in OpenAI's form; its body is as the client wrote it."""

    custom_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line."""

    custom_id: str | None
    message: str
    code: str = "invalid_line"


def parse_line(number: int, raw: bytes | None) -> ParsedLine | BadLine:
    """Parse one line, to be asked by a client."""
    return _read(number, raw, _parse)


def _parse(name: str, fields: Mapping[str, Any]) -> ParsedLine:
    if _OPENAI_FIELDS & fields.keys():
        return _openai_line(name, fields)
    return _plain_line(name, fields)


def read_http_line(number: int, raw: bytes | None, url: str) -> HttpLine | BadLine:
    """Read one line in OpenAI's form for a URL; its body is for the server of that URL."""

    def read(name: str, fields: Mapping[str, Any]) -> HttpLine:
        if fields.get("url") != url:
            raise BadBody(f"url: must be {url}, as that of the batch")
        return HttpLine(name, _body(fields))

    return _read(number, raw, read)


def _read(
    number: int, raw: bytes | None, parse: Callable[[str, Mapping[str, Any]], T]
) -> T | BadLine:
    """What ``parse``, which may raise `BadBody`, makes of the id and the fields of a line."""
    if raw is None:
        return BadLine(None, f"line {number} is too long", "line_too_long")
    try:
        fields = _decode(raw)
    except BadJson as error:
        return BadLine(None, f"line {number} is not a JSON object: {error}", "invalid_json_line")
    name = _name(fields, number)
    if isinstance(name, BadLine):
        return name
    try:
        return parse(name, fields)
    except BadBody as error:
        return BadLine(name, str(error), error.code)


def _name(fields: Mapping[str, Any], number: int) -> str | BadLine:
    """The id of a line; a plain line without an id has its number."""
    name = fields.get("custom_id")
    if _OPENAI_FIELDS & fields.keys():
        if not isinstance(name, str) or not name:
            return BadLine(None, f"line {number}: custom_id: must be a string that is not empty")
        return name
    name = fields.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        return BadLine(None, f"line {number}: id: must be a string or an integer")
    return str(name)


def _openai_line(name: str, fields: Mapping[str, Any]) -> ParsedLine:
    form = _FORMS.get(str(fields.get("url")))
    if form is None:
        raise BadBody(f"url: must be {CHAT_URL} or {COMPLETIONS_URL}")
    body = _body(fields)
    prompt = _messages(body) if form == "chat" else _prompt(body)
    options, params = _body_options(form, body)
    return ParsedLine(name, form, prompt, options, params)


def _body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a line in OpenAI's form."""
    _refuse_unknown(fields, _OPENAI_FIELDS)
    if fields.get("method", "POST") != "POST":
        raise BadBody("method: must be POST")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise BadBody("body: must be an object")
    return body


def _plain_line(name: str, fields: Mapping[str, Any]) -> ParsedLine:
    given = [kind for kind in _PROMPTS if fields.get(kind) is not None]
    if len(given) != 1:
        raise BadBody("give one of prompt, tokens and messages")
    [kind] = given
    _refuse_unknown(fields, _PLAIN_OPTIONS | _CHAT | _SAMPLING | {"id", *_PROMPTS})
    params = fields.get("params") or {}
    if not isinstance(params, dict):
        raise BadBody("params: must be an object")
    options = {field: fields[field] for field in _PLAIN_OPTIONS & fields.keys() if fields[field]}
    options.pop("params", None)
    _check_options(options)
    options |= {field: fields[field] for field in _CHAT & fields.keys()}
    params = params | {field: fields[field] for field in _SAMPLING & fields.keys()}
    _translate_bias(params)
    prompt = _messages(fields) if kind == "messages" else _plain_prompt(kind, fields[kind])
    form: Form = "chat" if kind == "messages" else "completion"
    return ParsedLine(name, form, prompt, options, params, wants_tokens=kind == "tokens")


def _refuse_unknown(fields: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise BadBody(f"there is no such field: {', '.join(unknown)}", "unknown_field")


def _check_options(options: Mapping[str, Any]) -> None:
    for field in _TEXTS:
        if not isinstance(options.get(field, ""), str):
            raise BadBody(f"{field}: must be a string")
    if not isinstance(options.get("metadata", {}), dict):
        raise BadBody("metadata: must be an object")


def _plain_prompt(kind: str, value: Any) -> Prompt:
    if kind == "prompt":
        if not isinstance(value, str):
            raise BadBody("prompt: must be a string; give token ids as tokens")
        return value
    return _token_ids("tokens", value)


def _prompt(body: Mapping[str, Any]) -> Prompt:
    """The prompt of a completion: a string, token ids, or a list with one of those."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise BadBody("body.prompt: give one prompt per line")
    return _token_ids("body.prompt", prompt)


def _token_ids(field: str, value: Any) -> list[int]:
    is_list = isinstance(value, list)
    if not is_list or not all(type(each) is int for each in value):
        raise BadBody(f"{field}: must be a string or a list of token ids")
    ids: list[int] = value
    return ids


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadBody("messages: must be a list that is not empty")
    if not all(isinstance(message, dict) for message in messages):
        raise BadBody("messages: each must be an object")
    return messages


def repeated(custom_id: str) -> BadLine:
    """A line whose id an earlier line has."""
    message = f"custom_id {custom_id!r}: an earlier line has it already"
    return BadLine(custom_id, message, "duplicate_custom_id")


# Translates the bodies of OpenAI requests to our options and vLLM's sampling parameters.
#
# It knows OpenAI's parameters and those that vLLM's server adds. An unsupported one is refused by
# name, not dropped.

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
#: Fields that are translated here.
_TRANSLATED: Final = frozenset(
    {
        "cache_salt",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "model",
        "prompt",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "top_logprobs",
    }
)


class BadBody(ValueError):
    """A body is invalid; ``code`` is for programs, the message for people."""

    def __init__(self, message: str, code: str = "invalid_line") -> None:
        super().__init__(message)
        self.code = code


def _body_options(form: Form, body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and sampling parameters of a body; raises `BadBody`.

    Unknown parameters are returned as sampling parameters, which the yard checks.
    """
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise BadBody("body.model: must be a string")
    options: dict[str, Any] = {"model": model} if model else {}
    if salt := body.get("cache_salt"):
        if not isinstance(salt, str):
            raise BadBody("body.cache_salt: must be a string")
        options["cache_salt"] = salt
    params: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in _IGNORED or name in _TRANSLATED:
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
    _translate_bias(params)
    _check_tool_choice(body)
    _translate_effort(body, options)
    return options, params


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


def _translate_bias(params: dict[str, Any]) -> None:
    """Token ids are keys of a JSON object, and so text."""
    given = params.get("logit_bias")
    if not isinstance(given, dict):
        return
    try:
        params["logit_bias"] = {int(token): bias for token, bias in given.items()}
    except ValueError as error:
        raise BadBody("logit_bias: its keys must be token ids") from error
