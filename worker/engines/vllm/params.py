"""Converts sampling parameters to vLLM's, and vLLM's errors to `InvalidRequest`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import msgspec
import vllm
from vllm import SamplingParams as VllmParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import SamplingParams

_NAMES: Final = frozenset(SamplingParams.__struct_fields__)
_DEFAULTS: Final = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
#: Replies always have the same form of logprobs.
_WITHOUT_EFFECT: Final = frozenset({"flat_logprobs"})
#: Parameters of the wire that the installed vLLM lacks.
_UNKNOWN: Final = _NAMES - _WITHOUT_EFFECT - frozenset(VllmParams.__struct_fields__)
_NOT_GIVEN: Final = _UNKNOWN | _WITHOUT_EFFECT
_WORD: Final = re.compile(r"\w+")
# vLLM may make a shallow copy for each request: nothing changes the nested values.
_OWN_COPY: Final = {"skip_clone": True} if "skip_clone" in VllmParams.__struct_fields__ else {}


class ParamsMaker:
    """Makes and checks vLLM's parameters once for all requests with equal parameters.

    vLLM copies them for each request before it changes them. But the copies share a set, in which
    vLLM notes the end tokens of the model. So each engine has its own maker.
    """

    def __init__(self) -> None:
        self._same = lru_cache(maxsize=256)(build_params)

    def make(
        self, params: SamplingParams, streams: bool, detokenize: bool, changes: Mapping[str, Any]
    ) -> VllmParams:
        """See `build_params`. Constraints on the text are not shared, because vLLM changes them."""
        if not changes and params.structured_outputs is None:
            try:
                return self._same(params, streams=streams, detokenize=detokenize)
            except TypeError:  # lists are not hashable
                pass
        return build_params(params, streams=streams, detokenize=detokenize, **changes)


def build_params(
    params: SamplingParams, *, streams: bool, detokenize: bool, **changes: Any
) -> VllmParams:
    """Make vLLM's parameters; ``changes`` replaces some by name.

    Raises `InvalidRequest` with the field that vLLM refuses.
    """
    _check_known(params)
    kind = RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY
    named = msgspec.structs.asdict(params) | changes
    named |= {"detokenize": detokenize, "output_kind": kind} | _OWN_COPY
    for name in _NOT_GIVEN:
        named.pop(name, None)
    try:
        if params.structured_outputs is not None:
            constraint = msgspec.structs.asdict(params.structured_outputs)
            named["structured_outputs"] = StructuredOutputsParams(**constraint)
        if params.repetition_detection is not None:
            asked = msgspec.structs.asdict(params.repetition_detection)
            named["repetition_detection"] = _repetition_detection(asked)
        return VllmParams(**named)
    except InvalidRequest:
        raise
    except Exception as error:  # vLLM's validation errors have no common base class in all versions
        raise refusal(error, params) from error


def _check_known(params: SamplingParams) -> None:
    """Raise `InvalidRequest` for parameters that this vLLM lacks."""
    for name in _UNKNOWN:
        if getattr(params, name) != _DEFAULTS[name]:
            raise InvalidRequest(
                f"params.{name}", f"vLLM {vllm.__version__} of this worker has no such parameter"
            )


def _repetition_detection(asked: dict[str, Any]) -> Any:
    # Not at the top: older versions lack it.
    from vllm.sampling_params import RepetitionDetectionParams

    try:
        return RepetitionDetectionParams(**asked)
    except Exception as error:
        raise InvalidRequest("params.repetition_detection", str(error)) from error


def refusal(error: Exception, params: SamplingParams) -> InvalidRequest:
    """Convert vLLM's error to ours, with the field if the error shows it."""
    message = reason_of(error)
    return InvalidRequest(_field(error, message, params), message)


def reason_of(error: Exception) -> str:
    """The text of vLLM's error, without what its classes add, and not too long."""
    return (str(error.args[0]) if error.args else str(error))[:1000]


def _field(error: Exception, message: str, params: SamplingParams) -> str:
    parameter = getattr(error, "parameter", None)
    if parameter in _NAMES:
        return f"params.{parameter}"
    words = _WORD.findall(message)
    if words and words[0] in _NAMES:
        return f"params.{words[0]}"
    if params.structured_outputs is not None:
        return "params.structured_outputs"
    named = [word for word in words if word in _NAMES and word != "n"]
    return f"params.{named[0]}" if named else "params"
