"""From what a user writes to requests: `RequestBuilder` checks, tokenizes and measures.

What is wrong with a request is said here, before anything is sent, in the words that the
coordinator would use.
"""

from __future__ import annotations

import datetime
import itertools
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict, cast

import msgspec
from msgspec import UNSET, Struct

from tokenyard.client.durability import Durability, check_durability
from tokenyard.client.tokenization import PROMPT_TAIL, LocalText, Tokenizer
from tokenyard.protocol.digest import Recipe, canonical_messages, defaults_among
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import PRIORITY_CLASSES, PriorityClass
from tokenyard.protocol.parse import parse_messages, parse_request, read_chat_options
from tokenyard.protocol.sampling import why_unknown
from tokenyard.protocol.wire import (
    DEFAULT_RESULT_TTL_S,
    MAX_TOKEN_ID,
    PLAIN_CHAT,
    ChatOptions,
    RepetitionDetection,
    Request,
    RequestTemplate,
    SamplingParams,
    StructuredOutputs,
    Unanswerable,
    chat_fields,
    pack_tokens,
    request_fields,
    template_of,
)

Messages = Sequence[Mapping[str, Any]]
#: Text, token ids, or chat messages.
Prompt = str | Sequence[int] | Messages


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters by vLLM's names; see `tokenyard.protocol.wire.SamplingParams`."""

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    structured_outputs: StructuredOutputs | dict[str, Any] | None
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    bad_words: list[str] | None
    watermarking: bool | None
    prompt_logprob_token_ids: list[list[int]] | None
    prompt_logprob_start: int | None
    logprob_token_ids: list[int] | None
    flat_logprobs: bool
    stream_interval: int | None
    extra_args: dict[str, Any] | None
    skip_reading_prefix_cache: bool | None
    thinking_token_budget: int | None
    repetition_detection: RepetitionDetection | dict[str, Any] | None
    trace_decode_token_ids: list[int] | None


class SharedOptions(SamplingOptions, total=False):
    """What may be said of many requests at once. Sampling parameters go beside the rest."""

    model: str  # the yard's default where left out
    params: SamplingParams | Mapping[str, Any]  # base for the sampling parameters beside it
    stream: bool  # whether deltas are published
    priority_class: PriorityClass  # which intake it waits in
    priority: int  # within the engine; lower is sooner
    deadline_s: float  # from now
    deadline: datetime.datetime  # with a time zone
    refuse_late: bool  # where it would wait beyond its deadline, refuse it at once
    durability: Durability  # what the submission waits for: memory, disk or replicated
    cancel_on_disconnect: bool  # cancel it when this client closes or disappears
    result_ttl_s: int  # how long the result can be read
    tenant: str
    session: str  # requests of one session may share a prefix
    metadata: Mapping[str, Any]  # comes along, unread
    tools: Sequence[Mapping[str, Any]]  # of a chat, as OpenAI writes them; shown to the model
    documents: Sequence[Mapping[str, Any]]  # of a chat, for templates that know them
    chat_template_kwargs: Mapping[str, Any]  # of a chat, such as {"enable_thinking": False}
    add_generation_prompt: bool  # of a chat: begin the model's turn, as is the default
    continue_final_message: bool  # of a chat: go on with the last message; needs the above False


class RequestOptions(SharedOptions, total=False):
    """What may be said of one request."""

    id: str  # unique for this client; submitting it again gives the same reply


class FullPrompt(RequestOptions, total=False):
    """One of many requests, where they differ in more than the prompt."""

    prompt: Prompt


#: One of many requests: a prompt, or a mapping with ``prompt`` and options of its own.
Item = Prompt | FullPrompt

#: Prompts that nearly all items are.
_PROMPTS: Final = (str, list)

#: What msgspec says of a name that it does not know.
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`")

#: Stand for those of a request while its options are checked.
_ANY_MESSAGES: Final = [{"role": "user", "content": "?"}]

#: Values that nobody can change after they were read, and options of one request alone.
_LASTING: Final = (str, int, float, bool, type(None))
_SINGULAR: Final = frozenset({"id", "deadline_s"})

_CHAT_OPTIONS: Final = frozenset(ChatOptions.__struct_fields__)
_OWN_OPTIONS: Final = RequestOptions.__annotations__.keys() - SamplingOptions.__annotations__.keys()


class PreparedRequest(Struct, frozen=True, eq=False, gc=False):
    """A request ready to be submitted."""

    request: Request
    priority_class: PriorityClass
    local_text: LocalText | None
    size: int  # bytes of its entry, as the coordinator counts them
    refuse_late: bool = False
    cancel_on_disconnect: bool = False
    request_template: RequestTemplate | None = None  # that of the request, where it is known
    digest: str = ""  # of what the user gave, whoever turns it into tokens
    durability: Durability = "memory"

    @property
    def terms(self) -> tuple[PriorityClass, bool, bool, Durability]:
        """What all requests of one submission have in common."""
        return self.priority_class, self.refuse_late, self.cancel_on_disconnect, self.durability


@dataclass(frozen=True, slots=True)
class _Template:
    """Options that have been read and found good."""

    request: Request  # everything but its id and prompt
    priority_class: PriorityClass
    silent_params: SamplingParams  # where the client makes the text itself
    refuse_late: bool
    cancel_on_disconnect: bool
    durability: Durability
    recipe: Recipe
    #: By the field of the prompt, and whether the client makes the text itself.
    templates: dict[tuple[str, bool], RequestTemplate] = field(default_factory=dict)

    def request_template(self, request: Request, kind: str) -> RequestTemplate:
        """The template of a request made from this template."""
        key = (kind, request.params is self.silent_params)
        if request.params is not self.silent_params and request.params is not self.request.params:
            return template_of(request)
        request_template = self.templates.get(key)
        if request_template is None:
            request_template = self.templates[key] = template_of(request)
        return request_template


class RequestBuilder:
    """Makes the requests of one client."""

    def __init__(self, client_id: str, tokenizer: Tokenizer | None) -> None:
        self._client_id = client_id
        self._tokenizer = tokenizer
        self._run = secrets.token_hex(6)
        self._count = itertools.count(1)
        self._known: tuple[Mapping[str, Any], _Template] | None = None
        #: Most bytes of one request; 0: no bound. Learnt at the handshake.
        self.max_request_bytes = 0
        #: The server's clock less ours. Learnt at the handshake.
        self.clock_offset_s = 0.0

    def draft(self, prompt: Prompt, options: Mapping[str, Any]) -> PreparedRequest:
        """One request; raises `InvalidRequest`."""
        try:
            return self._draft(prompt, None, self._known_template(options))
        except UnicodeEncodeError as fault:
            raise _no_text(fault, {"prompt": prompt}, options) from fault

    def has_room(self, draft: PreparedRequest, size: int) -> bool:
        """Whether a request may grow by so many bytes."""
        return not self.max_request_bytes or draft.size + size <= self.max_request_bytes

    def draft_many(
        self, items: Sequence[Item], shared: Mapping[str, Any]
    ) -> list[PreparedRequest | InvalidRequest]:
        """Requests in the order of ``items``; an error stands in the place of a bad one.

        Raises `InvalidRequest` for what is wrong with ``shared``.
        """
        try:
            template = self._known_template(shared)
        except UnicodeEncodeError as fault:
            raise _no_text(fault, {}, shared) from fault
        encoded = self._encode_texts(items)
        return [
            self._draft_safely(item, tokens, template, shared)
            for item, tokens in zip(items, encoded, strict=True)
        ]

    def _encode_texts(self, items: Sequence[Item]) -> Iterable[Sequence[int] | None]:
        """Token ids of the items that are text, in one call to the tokenizer."""
        if self._tokenizer is None:
            return itertools.repeat(None, len(items))
        texts = [item for item in items if isinstance(item, str) and item]
        try:
            ids = iter(self._tokenizer.encode(texts) if texts else ())
        except UnicodeEncodeError:  # one of them is no text: each for itself, then
            return itertools.repeat(None, len(items))
        return [next(ids) if isinstance(item, str) and item else None for item in items]

    def _draft_safely(
        self,
        item: Item,
        tokens: Sequence[int] | None,
        template: _Template,
        shared: Mapping[str, Any],
    ) -> PreparedRequest | InvalidRequest:
        try:
            if not isinstance(item, _PROMPTS) and isinstance(item, Mapping):
                own = dict(item)
                prompt = own.pop("prompt", "")
                template = self._template({**shared, **own})
                return self._draft(cast(Prompt, prompt), None, template)
            return self._draft(item, tokens, template)
        except InvalidRequest as fault:
            return fault
        except UnicodeEncodeError as fault:
            if not isinstance(item, _PROMPTS) and isinstance(item, Mapping):
                return _no_text(fault, {}, item)
            return _no_text(fault, {"prompt": item}, {})

    def _known_template(self, given: Mapping[str, Any]) -> _Template:
        """`_template`, read once where the same is said again and time plays no part in it."""
        known = self._known  # once: another thread may say something else meanwhile
        if known is not None and _is_same(known[0], given):
            return known[1]
        template = self._template(given)
        is_lasting = all(type(value) in _LASTING for value in given.values())
        if is_lasting and not given.keys() & _SINGULAR:
            self._known = dict(given), template
        return template

    def _template(self, given: Mapping[str, Any]) -> _Template:
        options = {name: given[name] for name in _OWN_OPTIONS if given.get(name) is not None}
        sampling = {name: value for name, value in given.items() if name not in _OWN_OPTIONS}
        priority_class = options.get("priority_class", "normal")
        if priority_class not in PRIORITY_CLASSES:
            raise InvalidRequest("priority_class", f"use one of {', '.join(PRIORITY_CLASSES)}")
        base = options.get("params", {})
        params = _params(base, sampling)
        # A base made of an object does not know what was said to it.
        given = sampling if isinstance(base, SamplingParams) else {**base, **sampling}
        chat = _chat(options)
        request = _checked(
            Request(
                id=options.get("id", "?"),
                client=self._client_id,
                prompt=None if chat else "?",
                messages=_ANY_MESSAGES if chat else None,
                model=options.get("model", ""),
                params=params,
                stream=bool(options.get("stream")),
                reply_to=f"replies:{self._client_id}",
                priority=options.get("priority", 0),
                deadline_ms=self._deadline_ms(options),
                result_ttl_s=options.get("result_ttl_s", DEFAULT_RESULT_TTL_S),
                tenant=options.get("tenant", ""),
                session=options.get("session", ""),
                metadata=options.get("metadata", {}),
                stated=defaults_among(params, given),
                chat=chat or PLAIN_CHAT,
            )
        )
        refuse_late = bool(options.get("refuse_late"))
        if refuse_late and request.deadline_ms is None:
            raise InvalidRequest("refuse_late", "needs a deadline")
        bare = msgspec.structs.replace(request, id="", prompt=None, messages=None)
        silent = msgspec.structs.replace(request.params, detokenize=False)
        return _Template(
            bare if "id" not in options else msgspec.structs.replace(bare, id=request.id),
            priority_class,
            silent,
            refuse_late,
            bool(options.get("cancel_on_disconnect")),
            check_durability(options.get("durability", "memory")),
            Recipe(request.model, request.params, request.stated),
        )

    def _deadline_ms(self, options: Mapping[str, Any]) -> int | None:
        if "deadline_s" in options:
            left_s = options["deadline_s"]
            if not isinstance(left_s, int | float):
                raise InvalidRequest("deadline_s", "give seconds from now")
            return max(1, int((time.time() + self.clock_offset_s + left_s) * 1000))
        deadline = options.get("deadline")
        if deadline is None:
            return None
        if not isinstance(deadline, datetime.datetime) or deadline.tzinfo is None:
            raise InvalidRequest("deadline", "give a datetime with a time zone, or deadline_s")
        return max(1, int(deadline.timestamp() * 1000))

    def _draft(
        self, prompt: Prompt, encoded: Sequence[int] | None, template: _Template
    ) -> PreparedRequest:
        kind = _kind(prompt)
        _check_chat(kind, template.request)
        if encoded is None and self._tokenizer is not None:
            encoded = _encode(self._tokenizer, kind, prompt)
        params, local_text = self._text(kind, encoded, template)
        given = kind
        content: Any = prompt if encoded is None else encoded
        if kind == "messages":
            content = _read_messages(content)
        if encoded is not None or kind == "tokens":
            kind, content = "tokens", _pack(content)
        request = msgspec.structs.replace(
            template.request,
            id=template.request.id or f"{self._run}-{next(self._count)}",
            params=params,
            **{kind: content},
        )
        size = len(request.id.encode()) + _content_size(content)
        request_template = template.request_template(request, kind)
        size += request_template.size
        if 0 < self.max_request_bytes < size:
            raise InvalidRequest(
                kind, f"the request has {size} bytes, of at most {self.max_request_bytes}"
            )
        return PreparedRequest(
            request,
            template.priority_class,
            local_text,
            size,
            template.refuse_late,
            template.cancel_on_disconnect,
            request_template,
            template.recipe.digest(given, _canonical(given, prompt, request), request.chat),
            template.durability,
        )

    def _text(
        self, kind: str, tokens: Sequence[int] | None, template: _Template
    ) -> tuple[SamplingParams, LocalText | None]:
        """Who makes the text: the client where it can, the worker where stop strings need it."""
        params = template.request.params
        if self._tokenizer is None or tokens is None:
            return params, None
        wants_text = kind != "tokens" if params.detokenize is UNSET else params.detokenize
        if wants_text and params.stop:
            return msgspec.structs.replace(params, detokenize=True), None
        if not wants_text:
            return template.silent_params, None
        tail = tuple(tokens[-PROMPT_TAIL:])
        local_text = LocalText(self._tokenizer, tail, params.skip_special_tokens)
        return template.silent_params, local_text


def _canonical(kind: str, prompt: Prompt, request: Request) -> bytes:
    """What the user gave, as `tokenyard.protocol.digest` wants to have it."""
    if kind == "tokens":
        return request.tokens or b""
    if kind == "prompt":
        return cast(str, prompt).encode()
    try:
        return canonical_messages(cast(Messages, prompt))
    except (TypeError, ValueError) as fault:
        raise InvalidRequest("messages", f"cannot be written as JSON: {fault}") from fault


def _content_size(value: Any) -> int:
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, str):
        return len(value.encode())
    return len(msgspec.json.encode(value))


def _chat(options: Mapping[str, Any]) -> ChatOptions | None:
    """What a chat template is given beside the messages; None where nothing is said."""
    given = {name: options[name] for name in _CHAT_OPTIONS & options.keys()}
    return read_chat_options(given) if given else None


def _check_chat(kind: str, request: Request) -> None:
    if kind != "messages" and request.chat is not PLAIN_CHAT:
        name = min(chat_fields(request.chat), default="")
        if name:
            raise InvalidRequest(name, "goes with chat messages only")


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    """Chat messages as the coordinator will read them."""
    try:
        return parse_messages(msgspec.json.encode(messages))
    except UnicodeEncodeError:
        raise
    except (TypeError, ValueError, RecursionError) as fault:
        raise InvalidRequest(
            "messages", f"cannot be written as JSON, or are nested too deeply: {fault}"
        ) from fault


def _no_text(
    fault: UnicodeEncodeError, own: Mapping[str, Any], options: Mapping[str, Any]
) -> InvalidRequest:
    """The error for text that UTF-8 cannot say, with the name of what holds it."""
    named = dict(own)
    for name, value in options.items():
        named[name if name in {*_OWN_OPTIONS, "prompt"} else f"params.{name}"] = value
    field = next((name for name, value in named.items() if not _is_text(value)), "prompt")
    if field == "prompt" and isinstance(named.get("prompt"), list):
        field = "messages"
    lone = fault.object[fault.start]
    return InvalidRequest(
        field,
        f"is no valid Unicode: it holds {lone!a} alone, from bytes that are not UTF-8 or from such"
        " an escape in JSON",
    )


def _is_text(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        return False
    except (TypeError, ValueError):
        return True  # wrong in another way
    return True


def _is_same(known: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the same is said: 1 is neither 1.0 nor True, of which one may be refused."""
    return known.keys() == given.keys() and all(
        type(value) is type(known[name]) and value == known[name] for name, value in given.items()
    )


def _checked(request: Request) -> Request:
    """The request as the coordinator would read it; raises `InvalidRequest`."""
    if not isinstance(request.metadata, Mapping):
        raise InvalidRequest("metadata", "must be a mapping")
    if request.result_ttl_s == 0:
        raise InvalidRequest("result_ttl", "must be at least 1")  # 0 would travel as "default"
    try:
        fields = request_fields(request)
    except UnicodeEncodeError:
        raise
    except (TypeError, ValueError) as fault:
        raise InvalidRequest("metadata", f"cannot be written as JSON: {fault}") from fault
    wire = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }
    read = parse_request(wire)
    if isinstance(read, Request):
        return msgspec.structs.replace(read, stated=request.stated)
    reason = read.reason if isinstance(read, Unanswerable) else read.message
    name, _, message = reason.partition(": ")
    raise InvalidRequest(name, message)


def _params(
    base: SamplingParams | Mapping[str, Any], sampling: Mapping[str, Any]
) -> SamplingParams:
    if isinstance(base, SamplingParams) and not sampling:
        return base
    try:
        values = {**msgspec.to_builtins(base), **msgspec.to_builtins(sampling)}
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as fault:
        message, _, path = str(fault).partition(" - at ")
        field = "params" + path.strip("`").removeprefix("$")
        if unknown := _UNKNOWN_FIELD.fullmatch(message):
            field, message = f"{field}.{unknown[1]}", why_unknown(unknown[1])
        raise InvalidRequest(field, message) from fault
    except TypeError as fault:
        raise InvalidRequest("params", str(fault)) from fault


def _kind(prompt: Prompt) -> Literal["tokens", "prompt", "messages"]:
    if type(prompt) is list and prompt and type(prompt[0]) is int:
        return "tokens"  # as nearly all are: the checks below take their time
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("prompt", "is empty")
        return "prompt"
    if isinstance(prompt, bytes | Mapping) or not hasattr(prompt, "__getitem__"):
        raise InvalidRequest("prompt", "give text, token ids or chat messages")
    if not len(prompt):
        raise InvalidRequest("tokens", "is empty")
    if not isinstance(prompt[0], Mapping):
        return "tokens"
    return "messages"


def _encode(tokenizer: Tokenizer, kind: str, prompt: Prompt) -> Sequence[int] | None:
    """The prompt as token ids; None for a chat, of which the worker makes them."""
    if kind == "prompt":
        [tokens] = tokenizer.encode([cast(str, prompt)])
        return tokens
    return cast(Sequence[int], prompt) if kind == "tokens" else None


def _pack(tokens: Any) -> bytes:
    try:
        packed = pack_tokens(tokens)
    except (OverflowError, TypeError) as fault:
        raise InvalidRequest("tokens", f"must be ids from 0 to {MAX_TOKEN_ID}: {fault}") from fault
    # The top byte of a negative id is 0x80 or more; this is how bytes are compared fastest.
    if not packed[3::4].isascii():
        raise InvalidRequest("tokens", "token ids must not be negative")
    return packed
