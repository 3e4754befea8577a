"""What a request is made of, checked and encoded before anything is sent.

Errors have the words that the coordinator would use.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, cast

import msgspec

from tokenyard.client.options import LEVELS, OWN_OPTIONS, Durability, Messages, Prompt
from tokenyard.client.tokenization import Tokenizer
from tokenyard.clock import BrokerTime
from tokenyard.protocol.digest import canonical_json
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import is_tenant
from tokenyard.protocol.parse import (
    UNKNOWN_FIELD,
    check_ids,
    parse_messages,
    read_chat_options,
    read_inputs,
    read_request,
    read_task,
    why_no_pooling_param,
)
from tokenyard.protocol.sampling import why_unknown
from tokenyard.protocol.tenants import TENANT_RULE
from tokenyard.protocol.wire import (
    MAX_TOKEN_ID,
    PLAIN_CHAT,
    ChatOptions,
    Input,
    PoolingParams,
    Request,
    SamplingParams,
    Task,
    chat_fields,
    pack_tokens,
    request_fields,
)

#: Longest time to a deadline: some ten thousand years, in milliseconds still exact in Lua.
_MOST_S: Final = 10**12
_CHAT_OPTIONS: Final = frozenset(ChatOptions.__struct_fields__)


def deadline_ms(options: Mapping[str, Any], broker_time: BrokerTime) -> int | None:
    """The deadline by the server's clock, in unix ms; raises `InvalidRequest`."""
    if "deadline_s" in options:
        left_s = options["deadline_s"]
        if not isinstance(left_s, int | float) or not 0 < left_s <= _MOST_S:
            raise InvalidRequest("deadline_s", "give seconds from now, more than 0")
        return int(broker_time.now_ms + left_s * 1000)
    deadline = options.get("deadline")
    if deadline is None:
        return None
    if not isinstance(deadline, datetime.datetime) or deadline.tzinfo is None:
        raise InvalidRequest("deadline", "give a datetime with a time zone, or deadline_s")
    return max(1, int(deadline.timestamp() * 1000))


def check_tenant(name: object) -> None:
    """On the wire another text is no tenant, which whoever gives one hardly means."""
    if name and not (isinstance(name, str) and is_tenant(name)):
        raise InvalidRequest("tenant", TENANT_RULE)


def check_durability(value: Any) -> Durability:
    """Read the option ``durability``; raises `InvalidRequest`."""
    if value not in LEVELS:
        raise InvalidRequest("durability", f"use one of {', '.join(LEVELS)}")
    return cast(Durability, value)


def canonical(kind: str, prompt: Prompt, request: Request) -> bytes:
    """The user's prompt in the form that `tokenyard.protocol.digest` takes."""
    if kind == "tokens":
        return request.tokens or b""
    if kind == "prompt":
        return cast(str, prompt).encode()
    try:
        return canonical_json(cast(Messages, prompt))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(kind, f"cannot be written as JSON: {error}") from error


def content_size(value: Any) -> int:
    """Bytes of a prompt on the wire."""
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, str):
        return len(value.encode())
    return len(msgspec.json.encode(value))


def read_chat(options: Mapping[str, Any]) -> ChatOptions | None:
    """The options for a chat template; None where none is given."""
    given = {name: options[name] for name in _CHAT_OPTIONS & options.keys()}
    return read_chat_options(given) if given else None


def check_chat(kind: str, request: Request) -> None:
    """Raises `InvalidRequest` for options of a chat with another kind of prompt."""
    if kind != "messages" and request.chat is not PLAIN_CHAT:
        name = min(chat_fields(request.chat), default="")
        if name:
            raise InvalidRequest(name, "goes with chat messages only")


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Chat messages as the coordinator reads them; raises `InvalidRequest`."""
    return parse_messages(_as_json("messages", messages))


def parse_inputs(inputs: Any) -> list[Input]:
    """Several inputs as the coordinator reads them; raises `InvalidRequest`."""
    return read_inputs({b"inputs": _as_json("inputs", inputs)})


def _as_json(field: str, value: Any) -> bytes:
    """Raises `InvalidRequest`, or `UnicodeEncodeError` for text that is not Unicode."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            field, f"cannot be written as JSON, or are nested too deeply: {error}"
        ) from error


def unicode_error(
    error: UnicodeEncodeError, own: Mapping[str, Any], options: Mapping[str, Any]
) -> InvalidRequest:
    """The error for text that UTF-8 cannot encode, with the name of its field."""
    named = dict(own)
    for name, value in options.items():
        named[name if name in {*OWN_OPTIONS, "prompt"} else f"params.{name}"] = value
    field = next((name for name, value in named.items() if not _is_unicode(value)), "prompt")
    if field == "prompt" and isinstance(named.get("prompt"), list):
        field = "messages"
    lone = error.object[error.start]
    return InvalidRequest(
        field,
        f"is no valid Unicode: it holds {lone!a} alone, from bytes that are not UTF-8 or from such"
        " an escape in JSON",
    )


def _is_unicode(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        return False
    except (TypeError, ValueError):
        return True  # invalid for another reason
    return True


def are_same(known: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether options are the same: 1, 1.0 and True are different, since one may be invalid."""
    return known.keys() == given.keys() and all(
        type(value) is type(known[name]) and value == known[name] for name, value in given.items()
    )


def check_request(request: Request) -> Request:
    """The request as the coordinator reads it; raises `InvalidRequest`."""
    if not isinstance(request.metadata, Mapping):
        raise InvalidRequest("metadata", "must be a mapping")
    if request.result_ttl_s == 0:
        raise InvalidRequest("result_ttl", "must be at least 1")  # on the wire 0 means the default
    try:
        fields = request_fields(request)
    except UnicodeEncodeError:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidRequest("metadata", f"cannot be written as JSON: {error}") from error
    wire = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }
    return msgspec.structs.replace(read_request(wire), stated=request.stated)


def read_task_name(name: Any) -> Task:
    """The task of a request; raises `InvalidRequest`."""
    return read_task({b"task": str(name).encode()})


P = TypeVar("P", SamplingParams, PoolingParams)
_WHY_UNKNOWN: Final[Mapping[type, Callable[[str], str]]] = {
    SamplingParams: why_unknown,
    PoolingParams: why_no_pooling_param,
}


def read_params(kind: type[P], base: Any, named: Mapping[str, Any]) -> P:
    """The parameters of a task: base values, or a mapping, and those by name.

    Raises `InvalidRequest`.
    """
    if isinstance(base, kind) and not named:
        return base
    try:
        values = {**msgspec.to_builtins(base), **msgspec.to_builtins(named)}
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        field = "params" + path.strip("`").removeprefix("$")
        if unknown := UNKNOWN_FIELD.fullmatch(message):
            field, message = f"{field}.{unknown[1]}", _WHY_UNKNOWN[kind](unknown[1])
        raise InvalidRequest(field, message) from error
    except TypeError as error:
        raise InvalidRequest("params", str(error)) from error


def prompt_kind(prompt: Prompt) -> Literal["tokens", "prompt", "messages", "inputs"]:
    """The field that a prompt goes into; raises `InvalidRequest`."""
    if type(prompt) is list and prompt and type(prompt[0]) is int:
        return "tokens"  # the usual case; the checks below are slower
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("prompt", "is empty")
        return "prompt"
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
        raise InvalidRequest("prompt", "give text, token ids or chat messages")
    if not len(prompt):
        raise InvalidRequest("tokens", "is empty")
    if isinstance(prompt[0], Mapping):
        return "messages"
    return "inputs" if isinstance(prompt[0], str | Sequence) else "tokens"


def is_ids(item: Any) -> bool:
    """Whether an item of many is a list of token ids."""
    return isinstance(item, list | tuple) and bool(item) and isinstance(item[0], int)


def encode_prompt(tokenizer: Tokenizer, kind: str, prompt: Prompt) -> Sequence[int] | None:
    """The prompt as token ids; None for what the worker tokenizes."""
    if kind == "prompt":
        [tokens] = tokenizer.encode([cast(str, prompt)])
        return tokens
    return cast(Sequence[int], prompt) if kind == "tokens" else None


def pack_prompt(tokens: Any) -> bytes:
    """Packed token ids; raises `InvalidRequest`."""
    try:
        return check_ids(pack_tokens(tokens))
    except (OverflowError, TypeError) as error:
        raise InvalidRequest("tokens", f"must be ids from 0 to {MAX_TOKEN_ID}: {error}") from error
