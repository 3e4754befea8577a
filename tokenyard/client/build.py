"""`RequestBuilder` turns what a user gives into requests: checked, tokenized and measured."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import msgspec
from msgspec import UNSET, Struct

from tokenyard.client import checks
from tokenyard.client.options import OWN_OPTIONS, Durability, Item, Messages, Prompt
from tokenyard.client.tokenization import PROMPT_TAIL, LocalText, Tokenizer
from tokenyard.clock import BrokerTime
from tokenyard.protocol.digest import Recipe, defaults_among
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.keys import PRIORITY_CLASSES, PriorityClass
from tokenyard.protocol.media import NO_MEDIA, Media, take_media
from tokenyard.protocol.packs import PACK_BYTES, in_packs
from tokenyard.protocol.parse import check_task
from tokenyard.protocol.wire import (
    DEFAULT_RESULT_TTL_S,
    GENERATE,
    PLAIN_CHAT,
    Input,
    PoolingParams,
    Request,
    RequestTemplate,
    SamplingParams,
    template_of,
)

#: The types of nearly all prompts.
_PROMPTS: Final = (str, list)
#: Placeholder for the messages of a request while its options are checked.
_ANY_MESSAGES: Final = [{"role": "user", "content": "?"}]
#: Types of values that cannot change after they were read, and options of one request alone.
_IMMUTABLE: Final = (str, int, float, bool, type(None))
_SINGULAR: Final = frozenset({"id", "deadline_s"})


class SubmissionTerms(NamedTuple):
    """The options of a request that its entry does not carry."""

    priority_class: PriorityClass = "normal"
    refuse_late: bool = False
    cancel_on_disconnect: bool = False
    durability: Durability = "memory"


class PreparedRequest(Struct, frozen=True, eq=False, gc=False):
    """A request ready to be submitted."""

    request: Request
    terms: SubmissionTerms
    local_text: LocalText | None
    size: int  # bytes of its entry, as the coordinator counts them
    template: RequestTemplate  # of the request
    digest: str = ""  # of the user's input, before it becomes tokens
    media: Media = NO_MEDIA  # that its messages name
    packed: int = 0  # items of a `map` in it, each with a result of its own; 0: it is one item


@dataclass(frozen=True, slots=True)
class _CheckedOptions:
    """Valid options."""

    request: Request  # everything but its id and prompt
    terms: SubmissionTerms
    silent_params: SamplingParams  # where the client makes the text itself
    recipe: Recipe
    #: By the prompt's field, and whether the client makes the text itself.
    templates: dict[tuple[str, bool], RequestTemplate] = field(default_factory=dict)

    def template_for(self, request: Request, kind: str) -> RequestTemplate:
        """The template of a request with these options."""
        is_silent = request.params is self.silent_params
        if not is_silent and request.params is not self.request.params:
            return template_of(request)
        template = self.templates.get((kind, is_silent))
        if template is None:
            template = self.templates[kind, is_silent] = template_of(request)
        return template


class RequestBuilder:
    """Makes the requests of one client."""

    def __init__(self, client_id: str, tokenizer: Tokenizer | None) -> None:
        self._client_id = client_id
        self._tokenizer = tokenizer
        self._run = secrets.token_hex(6)
        self._count = itertools.count(1)
        self._last: tuple[Mapping[str, Any], _CheckedOptions] | None = None
        #: Most bytes of one request; 0: no limit. Set by the handshake.
        self.max_request_bytes = 0
        self.broker_time = BrokerTime()

    def prepare(self, prompt: Prompt, options: Mapping[str, Any]) -> PreparedRequest:
        """One request; raises `InvalidRequest`."""
        try:
            return self._prepare(prompt, None, self._read_options(options))
        except UnicodeEncodeError as error:
            raise checks.unicode_error(error, {"prompt": prompt}, options) from error

    def has_room(self, prepared: PreparedRequest, size: int) -> bool:
        """Whether a request may grow by ``size`` bytes."""
        return not self.max_request_bytes or prepared.size + size <= self.max_request_bytes

    def prepare_many(
        self, items: Sequence[Item], shared: Mapping[str, Any]
    ) -> list[PreparedRequest | InvalidRequest]:
        """Requests in the order of ``items``, with an error in the place of an invalid one.

        Raises `InvalidRequest` where ``shared`` is invalid.
        """
        try:
            options = self._read_options(shared)
        except UnicodeEncodeError as error:
            raise checks.unicode_error(error, {}, shared) from error
        encoded = self._encode_texts(items, options.request.pools)
        return [
            self._prepare_or_error(item, tokens, options, shared)
            for item, tokens in zip(items, encoded, strict=True)
        ]

    def prepare_map(
        self, items: Sequence[Item], shared: Mapping[str, Any]
    ) -> list[PreparedRequest | InvalidRequest]:
        """`prepare_many`, but that plain inputs of a task that pools share requests."""
        if shared.get("task", GENERATE) == GENERATE:
            return self.prepare_many(items, shared)
        found: list[PreparedRequest | InvalidRequest] = []
        for kind, alike in itertools.groupby(map(_read_plain, items), type):
            if kind is _PlainInput:
                inputs = (one.content for one in cast(Iterable[_PlainInput], alike))
                for pack in in_packs(inputs, checks.content_size, PACK_BYTES):
                    found += self._prepare_pack(pack, shared)
            elif kind is InvalidRequest:
                found += cast(Iterable[InvalidRequest], alike)
            else:
                found += self.prepare_many(cast(list[Item], list(alike)), shared)
        return found

    def _prepare_pack(
        self, inputs: list[Input], shared: Mapping[str, Any]
    ) -> list[PreparedRequest | InvalidRequest]:
        [made] = self.prepare_many([inputs], shared)
        if isinstance(made, PreparedRequest):
            return [msgspec.structs.replace(made, packed=len(inputs))]
        return [made] * len(inputs)

    def _encode_texts(self, items: Sequence[Item], pools: bool) -> Iterable[Sequence[int] | None]:
        """Token ids of the items that are text, in one call to the tokenizer."""
        if self._tokenizer is None or pools:
            return itertools.repeat(None, len(items))
        texts = [item for item in items if isinstance(item, str) and item]
        try:
            ids = iter(self._tokenizer.encode(texts) if texts else ())
        except UnicodeEncodeError:  # one of them is not Unicode: encode each by itself
            return itertools.repeat(None, len(items))
        return [next(ids) if isinstance(item, str) and item else None for item in items]

    def _prepare_or_error(
        self,
        item: Item,
        tokens: Sequence[int] | None,
        options: _CheckedOptions,
        shared: Mapping[str, Any],
    ) -> PreparedRequest | InvalidRequest:
        try:
            if not isinstance(item, _PROMPTS) and isinstance(item, Mapping):
                own = dict(item)
                prompt = own.pop("prompt", "")
                options = self._check_options({**shared, **own})
                return self._prepare(cast(Prompt, prompt), None, options)
            return self._prepare(item, tokens, options)
        except InvalidRequest as error:
            return error
        except UnicodeEncodeError as error:
            if not isinstance(item, _PROMPTS) and isinstance(item, Mapping):
                return checks.unicode_error(error, {}, item)
            return checks.unicode_error(error, {"prompt": item}, {})

    def _read_options(self, given: Mapping[str, Any]) -> _CheckedOptions:
        """`_check_options`, done once for options that repeat and do not depend on the time."""
        last = self._last  # read once: another thread may replace it
        if last is not None and checks.are_same(last[0], given):
            return last[1]
        options = self._check_options(given)
        is_lasting = all(type(value) in _IMMUTABLE for value in given.values())
        if is_lasting and not given.keys() & _SINGULAR:
            self._last = dict(given), options
        return options

    def _check_options(self, given: Mapping[str, Any]) -> _CheckedOptions:
        options = {name: given[name] for name in OWN_OPTIONS if given.get(name) is not None}
        named = {name: value for name, value in given.items() if name not in OWN_OPTIONS}
        priority_class = options.get("priority_class", "normal")
        if priority_class not in PRIORITY_CLASSES:
            raise InvalidRequest("priority_class", f"use one of {', '.join(PRIORITY_CLASSES)}")
        checks.check_tenant(options.get("tenant", ""))
        base = options.get("params", {})
        task = checks.read_task_name(options.get("task", GENERATE))
        pools = task != GENERATE
        params = SamplingParams() if pools else checks.read_params(SamplingParams, base, named)
        pooling = checks.read_params(PoolingParams, base, named) if pools else PoolingParams()
        # A base that is an object does not know which of its values were given.
        given = named if isinstance(base, SamplingParams | PoolingParams) else {**base, **named}
        chat = checks.read_chat(options)
        request = checks.check_request(
            Request(
                id=options.get("id", "?"),
                client=self._client_id,
                prompt=None if chat else "?",
                messages=_ANY_MESSAGES if chat else None,
                model=options.get("model", ""),
                params=params,
                task=task,
                pooling=pooling,
                query=options.get("query", ""),
                stream=bool(options.get("stream")),
                stream_interval_ms=options.get("stream_interval_ms"),
                reply_to=f"replies:{self._client_id}",
                priority=options.get("priority", 0),
                deadline_ms=checks.deadline_ms(options, self.broker_time),
                result_ttl_s=options.get("result_ttl_s", DEFAULT_RESULT_TTL_S),
                tenant=options.get("tenant", ""),
                session=options.get("session", ""),
                metadata=options.get("metadata", {}),
                stated=() if pools else defaults_among(params, given),
                chat=chat or PLAIN_CHAT,
                cache_salt=options.get("cache_salt", ""),
            )
        )
        refuse_late = bool(options.get("refuse_late"))
        if refuse_late and request.deadline_ms is None:
            raise InvalidRequest("refuse_late", "needs a deadline")
        own_id = request.id if "id" in options else ""
        bare = msgspec.structs.replace(request, id=own_id, prompt=None, messages=None)
        silent = msgspec.structs.replace(request.params, detokenize=False)
        return _CheckedOptions(
            bare,
            SubmissionTerms(
                priority_class,
                refuse_late,
                bool(options.get("cancel_on_disconnect")),
                checks.check_durability(options.get("durability", "memory")),
            ),
            silent,
            Recipe(
                request.model,
                pooling if pools else request.params,
                request.stated,
                task=task,
                query=request.query,
            ),
        )

    def _prepare(
        self, prompt: Prompt, encoded: Sequence[int] | None, options: _CheckedOptions
    ) -> PreparedRequest:
        kind = checks.prompt_kind(prompt)
        checks.check_chat(kind, options.request)
        media: Media = NO_MEDIA
        if kind == "messages":
            prompt, media = take_media(cast(Messages, prompt))
        # The text of a task that pools is the worker's: its model may want it in another form.
        if encoded is None and self._tokenizer is not None and not options.request.pools:
            encoded = checks.encode_prompt(self._tokenizer, kind, prompt)
        params, local_text = self._text(kind, encoded, options)
        given = kind
        content: Any = prompt if encoded is None else encoded
        if kind == "messages":
            content = checks.read_messages(content)
        elif kind == "inputs":
            content = checks.parse_inputs(content)
        if encoded is not None or kind == "tokens":
            kind, content = "tokens", checks.pack_prompt(content)
        request = msgspec.structs.replace(
            options.request,
            id=options.request.id or f"{self._run}-{next(self._count)}",
            params=params,
            **{kind: content},
        )
        check_task(request)
        size = len(request.id.encode()) + checks.content_size(content)
        template = options.template_for(request, kind)
        size += template.size
        if 0 < self.max_request_bytes < size:
            raise InvalidRequest(
                kind, f"the request has {size} bytes, of at most {self.max_request_bytes}"
            )
        return PreparedRequest(
            request,
            options.terms,
            local_text,
            size,
            template,
            options.recipe.digest(given, checks.canonical(given, prompt, request), request.chat),
            media,
        )

    def _text(
        self, kind: str, tokens: Sequence[int] | None, options: _CheckedOptions
    ) -> tuple[SamplingParams, LocalText | None]:
        """The parameters to send, and how the client makes the text, unless the worker does.

        The client makes it where it can; stop strings need the worker.
        """
        params = options.request.params
        if self._tokenizer is None or tokens is None:
            return params, None
        wants_text = kind != "tokens" if params.detokenize is UNSET else params.detokenize
        if wants_text and params.stop:
            return msgspec.structs.replace(params, detokenize=True), None
        if not wants_text:
            return options.silent_params, None
        tail = tuple(tokens[-PROMPT_TAIL:])
        local_text = LocalText(self._tokenizer, tail, params.skip_special_tokens)
        return options.silent_params, local_text


@dataclass(frozen=True, slots=True)
class _PlainInput:
    """An input without options of its own, which may share a request."""

    content: Input


def _read_plain(item: Item) -> _PlainInput | Item | InvalidRequest:
    """A plain input, or the error of an invalid one; another item as it is."""
    if not isinstance(item, str) and not checks.is_ids(item):
        return item
    try:
        [content] = checks.parse_inputs([item])
    except UnicodeEncodeError as error:
        return checks.unicode_error(error, {"prompt": item}, {})
    except InvalidRequest as error:
        return InvalidRequest("prompt", error.message)
    return _PlainInput(content)
