"""Sampling parameters of the wire as vLLM's, and vLLM's refusals as ours."""

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
#: Replies have one form of logprobs, whatever was asked for.
_WITHOUT_EFFECT: Final = frozenset({"flat_logprobs"})
#: Parameters of the wire that the installed vLLM has not.
_UNKNOWN: Final = _NAMES - _WITHOUT_EFFECT - frozenset(VllmParams.__struct_fields__)
_NOT_GIVEN: Final = _UNKNOWN | _WITHOUT_EFFECT
_WORD: Final = re.compile(r"\w+")
# A flat copy for each request is enough for vLLM: nothing changes what is made below.
_OWN_COPY: Final = {"skip_clone": True} if "skip_clone" in VllmParams.__struct_fields__ else {}


class ParamsMaker:
    """Parameters for vLLM, made and checked once for all requests that ask for the same.

    vLLM copies them for each request before it changes them; but for the end tokens of the model,
    which it notes in a set that the copies share. So each engine has its own.
    """

    def __init__(self) -> None:
        self._same = lru_cache(maxsize=256)(build_params)

    def make(
        self, params: SamplingParams, streams: bool, detokenize: bool, changes: Mapping[str, Any]
    ) -> VllmParams:
        """See `build_params`; vLLM writes into a constraint on the text, so that is not shared."""
        if not changes and params.structured_outputs is None:
            try:
                return self._same(params, streams=streams, detokenize=detokenize)
            except TypeError:  # lists in them have no hash
                pass
        return build_params(params, streams=streams, detokenize=detokenize, **changes)


def build_params(
    params: SamplingParams, *, streams: bool, detokenize: bool, **changes: Any
) -> VllmParams:
    """Parameters for vLLM; ``changes`` replaces some by name.

    Raises `InvalidRequest` naming the field that vLLM refuses.
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
    except Exception as error:  # vLLM's validation errors have no common root in all versions
        raise refusal(error, params) from error


def _check_known(params: SamplingParams) -> None:
    """Refuse what is asked for and this vLLM has not yet."""
    for name in _UNKNOWN:
        if getattr(params, name) != _DEFAULTS[name]:
            raise InvalidRequest(
                f"params.{name}", f"vLLM {vllm.__version__} of this worker has no such parameter"
            )


def _repetition_detection(asked: dict[str, Any]) -> Any:
    # Not at the top: older versions have none.
    from vllm.sampling_params import RepetitionDetectionParams

    try:
        return RepetitionDetectionParams(**asked)
    except Exception as error:
        raise InvalidRequest("params.repetition_detection", str(error)) from error


def refusal(error: Exception, params: SamplingParams) -> InvalidRequest:
    """A refusal by vLLM as ours, with the field where it can be told."""
    message = str(error.args[0]) if error.args else str(error)
    return InvalidRequest(_field(error, message, params), message[:1000])


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
