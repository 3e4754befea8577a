"""Requests and assignments on the wire.

docs/protocol.md is the public form of this file, `tokenyard.protocol.parse` parses requests, and
`tokenyard.protocol.replies` has the replies. The wire only grows: new fields come last and have
defaults, readers skip unknown fields, and `WIRE_VERSION` changes only when an old reader would
misunderstand (then the old version stays readable for one release).

A request is a Redis stream entry: a mapping of field names to bytes. Token ids are packed as
little-endian int32.

Structs with ``gc=False`` are frozen and cannot be part of a reference cycle, so the collector need
not visit thousands of them.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tokenyard.protocol.errors import Code

WIRE_VERSION: Final = 1
MAX_ID_BYTES: Final = 200
MAX_FIELDS: Final = 100
MAX_TOKEN_ID: Final = 2**31 - 1
DEFAULT_CLIENT: Final = "anon"
DEFAULT_RESULT_TTL_S: Final = 3600
MAX_RESULT_TTL_S: Final = 30 * 24 * 3600
MAX_STREAM_INTERVAL_MS: Final = 60_000

ReplyKind = Literal["flat", "frame"]
#: What a model does with a request: it generates tokens, or it pools a prompt into numbers.
Task = Literal["generate", "embed", "classify", "score", "token_embed", "token_classify"]
GENERATE: Final[Task] = "generate"
TASKS: Final[tuple[Task, ...]] = get_args(Task)
#: Most inputs of one request.
MAX_INPUTS: Final = 2048

_SEQUENCES: Final = (list, tuple)

#: Estimated bytes of text for a token.
BYTES_PER_TOKEN: Final = 4
#: Estimated tokens of an answer without a limit.
UNBOUNDED_ANSWER: Final = 512


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian int32, four bytes each.

    Raises `OverflowError` for an id outside int32 and `TypeError` for one that is no integer.
    """
    if isinstance(tokens, _SEQUENCES):
        try:
            return _packer(len(tokens))(*tokens)  # a third of the time of an array
        except struct.error:
            pass  # the array has better error messages
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@functools.lru_cache(maxsize=4096)
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}i").pack


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of `pack_tokens`; raises `ValueError` where the length is no multiple of four."""
    if len(packed) == 4:  # nearly all deltas: a quarter of the time of an array
        return [int.from_bytes(packed, "little", signed=True)]
    tokens = array("i")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
#: A count, or -1 for all.
CountOrAll = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
# Engines hold counts and token ids in 32 bits.
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
#: A token id, or -1 to pad a row.
TokenIdOrNone = Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)]


class StructuredOutputs(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM's ``StructuredOutputsParams``: exactly one constraint on the text."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


class RepetitionDetection(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM's ``RepetitionDetectionParams``: what ends an answer that repeats itself."""

    max_pattern_size: Count = 0
    min_pattern_size: Count = 0
    min_count: Count = 0


class SamplingParams(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to sample, by the names, bounds and defaults of ``vllm.SamplingParams``.

    `tokenyard.protocol.sampling` says which of these are taken.
    """

    n: Annotated[int, Meta(ge=1, le=64)] = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0)] = 1.0
    temperature: Annotated[float, Meta(ge=0.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = 16
    min_tokens: Count = 0
    logprobs: CountOrAll | None = None
    prompt_logprobs: CountOrAll | None = None
    detokenize: bool | UnsetType = UNSET
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    watermarking: bool | None = None
    prompt_logprob_token_ids: list[list[TokenIdOrNone]] | None = None
    prompt_logprob_start: Count | None = None
    logprob_token_ids: list[TokenId] | None = None
    flat_logprobs: bool = False
    stream_interval: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: CountOrAll | None = None
    repetition_detection: RepetitionDetection | None = None
    trace_decode_token_ids: list[TokenId] | None = None

    def __post_init__(self) -> None:
        if self.seed == -1:  # as in vLLM: none
            msgspec.structs.force_setattr(self, "seed", None)


class PoolingParams(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to pool, by the names of ``vllm.PoolingParams``.

    ``truncate_prompt_tokens`` is that of vLLM's server: a longer input is cut to so many tokens, at
    -1 to as many as the model takes.
    """

    use_activation: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    step_tag_id: TokenId | None = None
    returned_token_ids: list[TokenId] | None = None
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: CountOrAll | None = None


#: One of several inputs: a text, token ids, or the token ids of the two texts of a pair.
Input = str | list[TokenId | list[TokenId]]


class ChatOptions(Struct, frozen=True, kw_only=True, gc=False):
    """Options for a chat template, by the names of ``vllm.LLM.chat``."""

    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True  # begin the model's turn
    continue_final_message: bool = False  # leave the last message open


PLAIN_CHAT: Final = ChatOptions()


class Request(Struct, frozen=True, kw_only=True, gc=False):
    """A client's request, immutable. It has exactly one of the four prompts."""

    id: str
    client: str = DEFAULT_CLIENT
    tokens: bytes | None = None  # packed
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    inputs: list[Input] | None = None  # several, for a task that pools; each gets its own numbers
    model: str = ""  # the yard's only model where empty
    params: SamplingParams = SamplingParams()  # of the task `generate`
    task: Task = GENERATE
    pooling: PoolingParams = PoolingParams()  # of the other tasks
    query: str = ""  # of the task `score`: what the prompt or each input is compared with
    stream: bool = False
    stream_interval_ms: int | None = None  # least time between deltas; None: the worker's
    reply_to: str = ""
    priority: int = 0  # lower is sooner; passed on to the engine
    deadline_ms: int | None = None  # unix time
    result_ttl_s: int = DEFAULT_RESULT_TTL_S
    tenant: str = ""
    session: str = ""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    #: Parameters that are written although they have the wire's default, so that a model's default
    #: does not replace it. Not a field on the wire.
    stated: tuple[str, ...] = ()
    chat: ChatOptions = PLAIN_CHAT  # with messages only
    cache_salt: str = ""  # see `prefix_salt`
    #: Of a model with a reasoning parser, for `structured_outputs`, which constrain only what
    #: follows the reasoning: whether the prompt ends it, and arguments of the parser.
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    #: Of tokens: the names of pictures, sound and video by modality, in the order of their marks.
    media: dict[str, list[str]] = msgspec.field(default_factory=dict)

    @property
    def wants_text(self) -> bool:
        """Whether replies have text: as requested, by default where the prompt was text."""
        if self.params.detokenize is not UNSET:
            return self.params.detokenize
        return self.tokens is None and not self.pools

    @property
    def pools(self) -> bool:
        """Whether its result has numbers instead of tokens."""
        return self.task != GENERATE

    @property
    def prefix_salt(self) -> str:
        """What separates prefix caches; "" is common to all requests without tenant and salt.

        A tenant's are its own, whatever salt it gives: nobody guesses another's prompt by timing.
        """
        return f"{self.tenant}/{self.cache_salt}" if self.tenant or self.cache_salt else ""

    @property
    def work(self) -> int:
        """Most tokens in and out; those of a text prompt are estimated.

        Coordinator and worker must compute the same number: one adds it to a load, the other
        subtracts it.
        """
        if self.pools:
            return self._prompt_tokens()
        answer = self.params.max_tokens or UNBOUNDED_ANSWER
        return self._prompt_tokens() + self.params.n * answer

    def _prompt_tokens(self) -> int:
        if self.tokens is not None:
            return len(self.tokens) // 4
        value = prompt_value(self)
        size = len(value.encode() if isinstance(value, str) else value)
        return -(-size // BYTES_PER_TOKEN)


class Refused(Struct, frozen=True):
    """A request that is answered without an engine."""

    id: str
    client: str
    reply_to: str
    code: Code
    message: str
    result_ttl_s: int = DEFAULT_RESULT_TTL_S
    is_dead: bool = False  # also kept as a dead letter


class Unanswerable(Struct, frozen=True):
    """An entry that cannot be answered, since it has no valid id and client."""

    reason: str


class Assignment(Struct, frozen=True, kw_only=True):
    """A request on a lane. (worker, attempt) is the fencing token."""

    request: Request
    entry: str  # of the lane
    sid: str  # server-side id: "<intake>/<intake entry>"
    attempt: int
    crashes: int = 0  # workers that died while they ran it
    published: bytes = b""  # packed tokens that were published before
    faults: int = 0  # how often an engine could not serve it
    fault: str = ""  # why this version cannot read the request, if it cannot
    first_epoch: int | None = None  # the generation epoch of the first published token
    choices: bytes = b""  # the choice of each published token, a byte each; for n > 1 only
    is_charged: bool = False  # to a tenant: `finish` wants to know what it has used
    media: Mapping[str, bytes] = {}  # of its messages, by name

    @property
    def without_media(self) -> Assignment:
        """The same for whoever does not run it: its media may be large."""
        return msgspec.structs.replace(self, media={}) if self.media else self

    def published_of(self, index: int) -> list[int]:
        """The published tokens of one choice."""
        tokens = unpack_tokens(self.published)
        if self.request.params.n == 1:
            return tokens
        return [token for token, whose in zip(tokens, self.choices, strict=True) if whose == index]

    @property
    def accepted_ms(self) -> int:
        """Unix time of acceptance by the server's clock, the same for each attempt."""
        return int(self.sid.rpartition("/")[2].partition("-")[0])

    @property
    def waited_ms(self) -> int:
        """Time from acceptance to assignment, both by the server's clock."""
        return max(0, int(self.entry.partition("-")[0]) - self.accepted_ms)


#: Fields that only the system writes; those of a client are dropped.
SYSTEM_FIELDS: Final = frozenset(
    {
        b"sid",
        b"attempt",
        b"crashes",
        b"suspected",
        b"crashed_alone",
        b"lost_alone",
        b"faults",
        b"reason",
        b"not_before",
        b"published",
        b"epoch",
        b"trial",
        b"relapsed",
        b"choices",
        b"charged",
        b"base_model",
    }
)

#: The fields of which a request has exactly one.
PromptField = Literal["tokens", "prompt", "messages", "inputs"]
PROMPTS: Final[tuple[PromptField, ...]] = get_args(PromptField)
#: The fields that differ for each entry; the rest may be in ``common``.
OWN_FIELDS: Final = frozenset({"id", *PROMPTS})

_encode_json = msgspec.json.Encoder().encode


def request_fields(request: Request) -> dict[str, bytes | str | int]:
    """A request as the fields of its intake entry, without defaults."""
    fields: dict[str, bytes | str | int] = {"id": request.id, "v": WIRE_VERSION}
    fields[prompt_field(request)] = prompt_value(request)
    if request.pools:
        fields["task"] = request.task
    params = _encode_json(request.pooling if request.pools else request.params)
    if request.stated:
        stated = {name: getattr(request.params, name) for name in request.stated}
        params = _encode_json({**msgspec.to_builtins(request.params, str_keys=True), **stated})
    if params != b"{}":
        fields["params"] = params
    if request.stream:
        fields["stream"] = 1
        if request.stream_interval_ms is not None:
            fields["stream_interval_ms"] = request.stream_interval_ms
    if request.metadata:
        fields["metadata"] = _encode_json(request.metadata)
    if request.chat is not PLAIN_CHAT:
        fields.update(chat_fields(request.chat))
    if request.reasoning_ended is not None:
        fields["reasoning_ended"] = int(request.reasoning_ended)
    if request.reasoning_parser_kwargs:
        fields["reasoning_parser_kwargs"] = _encode_json(request.reasoning_parser_kwargs)
    if request.media:
        fields["media"] = _encode_json(request.media)
    plain: dict[str, str | int] = {
        "client": request.client if request.client != DEFAULT_CLIENT else "",
        "model": request.model,
        "reply_to": request.reply_to,
        "priority": request.priority,
        "deadline": request.deadline_ms or 0,
        "result_ttl": request.result_ttl_s if request.result_ttl_s != DEFAULT_RESULT_TTL_S else 0,
        "tenant": request.tenant,
        "session": request.session,
        "query": request.query,
        "cache_salt": request.cache_salt,
    }
    fields.update((name, value) for name, value in plain.items() if value)
    return fields


def chat_fields(chat: ChatOptions) -> dict[str, bytes | int]:
    """The options for a chat template as fields of an entry, without defaults."""
    fields: dict[str, bytes | int] = {}
    if chat.tools is not None:
        fields["tools"] = _encode_json(chat.tools)
    if chat.documents is not None:
        fields["documents"] = _encode_json(chat.documents)
    if chat.chat_template_kwargs:
        fields["chat_template_kwargs"] = _encode_json(chat.chat_template_kwargs)
    if not chat.add_generation_prompt:
        fields["add_generation_prompt"] = 0
    if chat.continue_final_message:
        fields["continue_final_message"] = 1
    return fields


class RequestTemplate(Struct, frozen=True):
    """The common part of requests, as `tokenyard.scripts.client.submit` writes it."""

    field: str  # that holds the prompt
    common: str  # JSON object: all other fields except the id, as texts
    size: int  # bytes of an entry without the values of its id and prompt
    deadline_ms: int = 0


def template_of(request: Request) -> RequestTemplate:
    """The common part of all requests that differ only in id and prompt."""
    fields = request_fields(request)
    [field] = OWN_FIELDS & fields.keys() - {"id"}
    texts = {
        name: value.decode() if isinstance(value, bytes) else str(value)
        for name, value in fields.items()
        if name not in OWN_FIELDS
    }
    common = _encode_json(texts)
    size = len("id") + len(field) + len("common") + len(common)
    return RequestTemplate(field, common.decode(), size, request.deadline_ms or 0)


def prompt_field(request: Request) -> PromptField:
    """The field that holds the prompt of a request."""
    if request.tokens is not None:
        return "tokens"
    if request.prompt is not None:
        return "prompt"
    return "messages" if request.inputs is None else "inputs"


def prompt_value(request: Request) -> bytes | str:
    """The prompt of a request as the value of its field."""
    if request.tokens is not None:
        return request.tokens
    if request.prompt is not None:
        return request.prompt
    return _encode_json(request.messages if request.inputs is None else request.inputs)
