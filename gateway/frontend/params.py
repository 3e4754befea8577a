"""vLLM's sampling parameters as those of the wire."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from gateway.frontend.side import tell_home
from gateway.http.context import CURRENT
from gateway.http.errors import GatewayError, invalid
from gateway.http.incoming import dumps_in_python
from tokenyard.protocol.sampling import TAKEN, grammar_fault, grammar_too_large
from tokenyard.protocol.wire import SamplingParams

if TYPE_CHECKING:
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

#: Parameters of vLLM's that have another place on the wire.
_ELSEWHERE: Final = {"detokenize", "stream_interval", "flat_logprobs", "structured_outputs"}
_COPIED: Final = tuple(name for name in TAKEN if name not in _ELSEWHERE)
_DEFAULTS: Final = SamplingParams()
_STRUCTURED: Final = (
    *("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    *("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"),
)


def wire_params(params: vllm.SamplingParams, *, detokenize: bool) -> SamplingParams:
    """The parameters of one request; raises `GatewayError` for what the wire cannot carry."""
    values: dict[str, Any] = {"detokenize": detokenize}
    for name, own_default in _carried(type(params)).items():
        value = getattr(params, name)
        if value not in (getattr(_DEFAULTS, name), own_default, [], {}):
            values[name] = _plain(value)
    if values.get("skip_reading_prefix_cache") is False and _may_read_cache(params):
        del values["skip_reading_prefix_cache"]  # a worker's vLLM derives the same
    if params.structured_outputs is not None:
        values["structured_outputs"] = {
            name: value
            for name, value in _constraint(params.structured_outputs).items()
            if value is not None and value is not False
        }
    if params.routed_experts_prompt_start:
        raise invalid("routed_experts_prompt_start", "not carried through the queue")
    if (params.extra_args or {}).get("kv_transfer_params"):
        raise invalid("kv_transfer_params", "names hosts, to which no worker connects for a client")
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        param = where.rstrip("`") or None
        raise GatewayError(400, f"{param}: {message}" if param else message, param=param) from error


def check_constraint(params: vllm.SamplingParams, max_bytes: int) -> None:
    """Raise `GatewayError` for a constraint on the text that is too large to be compiled."""
    if params.structured_outputs is None:
        return
    if fault := grammar_fault(_constraint(params.structured_outputs), max_bytes):
        raise invalid("structured_outputs", f"the constraint {fault}")


def check_asked(body: object, max_bytes: int) -> None:
    """The same for a body, which vLLM would take apart and repeat before it submits anything."""
    if CURRENT.get() is None or not isinstance(body, dict):
        return
    text = body.get("text")
    asked = {name: body.get(name) for name in ("structured_outputs", "response_format")}
    asked["text"] = text.get("format") if isinstance(text, dict) else None
    tools = body.get("tools")
    if isinstance(tools, list):
        asked |= {f"tools[{at}]": one for at, one in enumerate(tools)}
    for name, constraint in asked.items():
        if constraint and (size := len(dumps_in_python(constraint))) > max_bytes:
            what = "it" if name.startswith("tools") else "the constraint"
            _refuse(invalid(name, f"{what} {grammar_too_large(size, max_bytes)}"))


def bound_constraints(max_bytes: int) -> None:
    """Let vLLM's front end parse no constraint that `check_constraint` refuses.

    Structural tags, and what becomes of tools, are parsed while a body is validated, before there
    is anything to submit.
    """
    from vllm.v1.structured_output import backend_xgrammar

    def validate(sampling_params: vllm.SamplingParams) -> None:
        try:
            check_constraint(sampling_params, max_bytes)
        except GatewayError as error:
            _refuse(error)
        parse(sampling_params)

    parse = backend_xgrammar.validate_xgrammar_grammar
    backend_xgrammar.validate_xgrammar_grammar = validate


def _refuse(error: GatewayError) -> NoReturn:
    """Refuse the request being served out of vLLM's own code, whichever error that makes of it."""
    context = CURRENT.get()
    if context is not None:
        tell_home(context.ticket.fail, error)
    raise error


def _constraint(given: StructuredOutputsParams) -> dict[str, Any]:
    return {name: getattr(given, name) for name in _STRUCTURED}


@functools.cache
def _carried(kind: type[vllm.SamplingParams]) -> Mapping[str, Any]:
    """The parameters that the wire and this vLLM have, and vLLM's own defaults.

    Watermarks are on by default in 0.30 and 0.31: no request has asked for these.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    return {name: defaults[name] for name in _COPIED if name in defaults}


def _may_read_cache(params: vllm.SamplingParams) -> bool:
    token_ids = getattr(params, "prompt_logprob_token_ids", None)  # from vLLM 0.31 on
    return params.prompt_logprobs is None and token_ids is None


def _plain(value: Any) -> Any:
    """A value without vLLM's types."""
    is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_object else value
