"""From what a front end asks to a request of the yard: what passes, and what is refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

from gateway.bridge.engine_core import FINAL_ONLY, EngineCoreRequest, EnginePoolingParams
from gateway.queue.yard import wire_input, wire_pooling
from tokenyard.protocol.digest import defaults_among
from tokenyard.protocol.keys import PRIORITY_CLASSES, PriorityClass, http_client, is_tenant
from tokenyard.protocol.sampling import TAKEN
from tokenyard.protocol.wire import MAX_ID_BYTES, Request, SamplingParams, pack_tokens

#: Parameters that a front end sees to itself, and what it derives from others.
_OF_FRONT_END: Final = frozenset(
    {
        *("output_kind", "detokenize", "stop", "include_stop_str_in_output", "flat_logprobs"),
        *("skip_special_tokens", "spaces_between_special_tokens", "output_text_buffer_length"),
        *("skip_clone", "stream_interval", "ignore_eos", "structured_outputs", "watermarking"),
        *("_eos_token_id", "_all_stop_token_ids", "_bad_words_token_ids"),
    }
)
_POOLED: Final = frozenset({"embed", "classify", "token_embed", "token_classify"})
#: Parameters that a front end has filled in, so that no default of the yard's may replace them.
_STATED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


class Refused(Exception):
    """The yard does not take this request; the message says why."""


class Caller(NamedTuple):
    """Who asks, as told by the id that a key check has given a request (`id_of`)."""

    tenant: str = ""
    priority_class: PriorityClass = "normal"
    stream_interval_ms: int | None = None
    deadline_ms: int | None = None


#: "~tenant~class~interval~deadline~", of which each may be missing, stands before the rest.
_CALLER: Final = re.compile(r"~([^~]*)~([^~]*)~(\d{0,9})~(\d{0,15})~")


def id_of(caller: Caller, name: str) -> str:
    """The X-Request-Id by which a front end passes on who asks; ``name`` is the rest of it."""
    interval, deadline = ("" if one is None else str(one) for one in caller[2:])
    return f"~{caller.tenant}~{caller.priority_class}~{interval}~{deadline}~{name}"


def read_id(given: str) -> tuple[Caller, str]:
    """Inverse of `id_of`, wherever in an id that stands; raises `Refused`."""
    found = _CALLER.search(given)
    if found is None:
        return Caller(), given
    tenant, name, interval, deadline = found.groups()
    if tenant and not is_tenant(tenant):
        raise Refused(f"X-Request-Id: {tenant!r} is no tenant")
    if name not in PRIORITY_CLASSES:
        raise Refused(f"X-Request-Id: {name!r} is no class")
    caller = Caller(
        tenant, name, int(interval) if interval else None, int(deadline) if deadline else None
    )
    return caller, given[: found.start()] + given[found.end() :]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the yard."""

    request: Request
    priority_class: PriorityClass
    #: Asked again under its id it is not generated again, and goes on without its client.
    is_kept: bool


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Reads the requests to one model."""

    model: str
    id_prefix: str
    result_ttl_s: int

    def read(self, asked: EngineCoreRequest) -> Asked:
        """The request; raises `Refused` for what the wire cannot carry."""
        if asked.prompt_token_ids is None or asked.mm_features:
            raise Refused("only prompts of text go through the queue")
        caller, name = read_id(asked.request_id)
        is_kept = self.id_prefix in name and asked.external_req_id is not None
        if is_kept:
            name = _without_random(name, asked.external_req_id or "")
        if caller.tenant:
            name = f"{name}~{caller.tenant}"
        if len(name.encode()) > MAX_ID_BYTES:
            raise Refused(f"request_id: has more than {MAX_ID_BYTES} bytes")
        pooling = asked.pooling_params
        task = _pooled(pooling, asked.prompt_token_ids) if pooling else _generated(asked)
        request = Request(
            id=name,
            client=http_client(caller.tenant),
            model=asked.lora_request[0] if asked.lora_request else self.model,
            stream_interval_ms=caller.stream_interval_ms,
            priority=asked.priority,
            deadline_ms=caller.deadline_ms,
            tenant=caller.tenant,
            session=asked.session_id or "",
            metadata=asked.trace_headers or {},
            cache_salt=asked.cache_salt or "",
            **task,
        )
        if is_kept:
            request = msgspec.structs.replace(request, result_ttl_s=self.result_ttl_s)
        return Asked(request, caller.priority_class, is_kept)


def _generated(asked: EngineCoreRequest) -> dict[str, Any]:
    """The fields of a request that generates; raises `Refused`."""
    given = asked.sampling_params
    if given is None:
        raise Refused("a request without parameters")
    params = _read_params(given)
    is_whole = given.get("output_kind") == FINAL_ONLY
    fields = {
        "tokens": pack_tokens(asked.prompt_token_ids or ()),
        "params": params,
        # The logprobs of a prompt come with the result, and a front end wants them first.
        "stream": not is_whole and params.prompt_logprobs is None,
        "stated": defaults_among(params, _STATED),
    }
    if params.structured_outputs:
        fields |= {
            "reasoning_ended": asked.reasoning_ended,
            "reasoning_parser_kwargs": asked.reasoning_parser_kwargs or {},
        }
    return fields


def _pooled(given: EnginePoolingParams, tokens: list[int]) -> dict[str, Any]:
    """The fields of a request that pools; raises `Refused`."""
    if given.task not in _POOLED:
        raise Refused(f"task: {given.task!r} is not carried through the queue")
    return {
        "task": given.task,
        "pooling": wire_pooling(given),
        "inputs": [wire_input(tokens, given)],
    }


def _without_random(name: str, external: str) -> str:
    """The id without what the front end has drawn, the same each time that it is asked."""
    _, wanted = read_id(external)
    before, _, _ = name.partition(wanted)
    return before + wanted  # ``before`` is the number of one of several answers


def _read_params(given: dict[str, Any]) -> SamplingParams:
    """The parameters; raises `Refused`."""
    values = {
        name: value
        for name, value in given.items()
        if name not in _OF_FRONT_END and value not in (None, [], {})
    }
    for name, value in values.items():
        if name not in TAKEN and value:
            raise Refused(f"{name}: not carried through the queue")
    if given.get("_bad_words_token_ids") and not given.get("bad_words"):
        raise Refused("bad_words: this front end does not pass them on")
    if (values.get("extra_args") or {}).get("kv_transfer_params"):
        raise Refused("kv_transfer_params: name hosts, to which no worker connects for a client")
    if values.get("skip_reading_prefix_cache") is False and "prompt_logprobs" not in values:
        del values["skip_reading_prefix_cache"]  # a worker's vLLM derives the same
    constraint = given.get("structured_outputs") or {}
    if constraint:
        values["structured_outputs"] = {
            name: value
            for name, value in constraint.items()
            if not name.startswith("_") and value not in (None, False)
        }
    values |= {"detokenize": False, "ignore_eos": given.get("_eos_token_id") is None}
    try:
        return msgspec.convert({n: v for n, v in values.items() if n in TAKEN}, SamplingParams)
    except msgspec.ValidationError as error:
        raise Refused(str(error).replace(" - at `$.", ": `")) from error
