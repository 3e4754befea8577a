"""The options of a request, as a program writes them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, get_args

from tokenyard.protocol.keys import PriorityClass
from tokenyard.protocol.wire import (
    Input,
    PoolingParams,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
    Task,
)

Messages = Sequence[Mapping[str, Any]]
#: Where a request must be stored before its submission counts as accepted.
Durability = Literal["memory", "disk", "replicated"]
LEVELS: Final = get_args(Durability)
#: Text, token ids, chat messages, or, for a task that pools, several texts or lists of token ids.
Prompt = str | Sequence[int] | Messages | Sequence[Input]


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


class PoolingOptions(TypedDict, total=False):
    """Parameters of a task that pools; see `tokenyard.protocol.wire.PoolingParams`."""

    use_activation: bool | None
    dimensions: int | None
    step_tag_id: int | None
    returned_token_ids: list[int] | None
    truncate_prompt_tokens: int | None


class SharedOptions(SamplingOptions, PoolingOptions, total=False):
    """Options that many requests can share, beside the parameters of their task."""

    model: str  # by default the yard's default model
    task: Task  # generate, or a task that pools: embed, classify, score, ...
    query: str  # of the task score: what the prompt or each input is compared with
    #: Base values, which the parameters given by name override.
    params: SamplingParams | PoolingParams | Mapping[str, Any]
    stream: bool  # whether deltas are published
    stream_interval_ms: int  # least time between them; 0: each token
    priority_class: PriorityClass  # the intake it is queued in
    priority: int  # within the engine; lower is sooner
    deadline_s: float  # from now
    deadline: datetime.datetime  # with a time zone
    refuse_late: bool  # refuse it immediately if it would wait beyond its deadline
    durability: Durability  # memory, disk or replicated: what the submission waits for
    cancel_on_disconnect: bool  # cancel it when this client closes or disappears
    result_ttl_s: int  # how long the result is kept
    tenant: str
    session: str  # requests of a session may share a prefix
    cache_salt: str  # prefix caches are shared only with requests of the same salt
    metadata: Mapping[str, Any]  # stored with the request, never interpreted
    tools: Sequence[Mapping[str, Any]]  # of a chat, in OpenAI's format; shown to the model
    documents: Sequence[Mapping[str, Any]]  # of a chat, for templates that support them
    chat_template_kwargs: Mapping[str, Any]  # of a chat, such as {"enable_thinking": False}
    add_generation_prompt: bool  # of a chat: begin the model's turn (the default)
    continue_final_message: bool  # of a chat: continue the last message; needs the above False


class RequestOptions(SharedOptions, total=False):
    """The options of one request."""

    id: str  # unique for this client; submitting the same id again returns the same reply


class FullPrompt(RequestOptions, total=False):
    """One of many requests, with options of its own."""

    prompt: Prompt


#: One of many requests: a prompt, or a mapping with ``prompt`` and options of its own.
Item = Prompt | FullPrompt

#: The options that are not sampling parameters.
OWN_OPTIONS: Final = (
    RequestOptions.__annotations__.keys()
    - SamplingOptions.__annotations__.keys()
    - PoolingOptions.__annotations__.keys()
)
