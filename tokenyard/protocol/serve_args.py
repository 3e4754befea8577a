"""Arguments of ``vllm serve`` that shape a model's requests and answers, by vLLM's names.

A models file gives them as ``serve_args``, hosts announce them, and gateways apply them. All others
are refused: what a host announces must not open ports or files of a gateway, or run code there. A
test compares both tables with the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

#: The accepted arguments, and the types of their values.
TAKEN: Final[Mapping[str, Any]] = {
    "chat_template": str,  # a file beside the models file, or the template itself
    "chat_template_content_format": Literal["auto", "string", "openai"],
    "default_chat_template_kwargs": dict[str, Any],
    "response_role": str,
    "return_tokens_as_token_ids": bool,
    "enable_auto_tool_choice": bool,
    "exclude_tools_when_tool_choice_none": bool,
    "tool_call_parser": str,
    "tool_strict_level": Literal["auto", "function", "parameter"],
    "reasoning_parser": str,
    "enable_prompt_tokens_details": bool,
    "enable_force_include_usage": bool,
    "cohere_is_reasoning_model": bool,
    "cohere_format": str,
    "anthropic_disabled_thinking_effort": Literal["auto", "none", "low"],
    "fingerprint_mode": Literal["full", "hash", "custom", "none"],
    "fingerprint_value": str,
}

#: Engine arguments that a front end needs, too. They are announced with the others.
OF_ENGINE: Final[Mapping[str, Any]] = {
    "tokenizer": str,
    "tokenizer_mode": str,
    "tokenizer_revision": str,
    "max_logprobs": int,
    "hf_overrides": dict[str, Any],
    "generation_config": str,
    "reasoning_config": dict[str, Any],
    "runner": Literal["auto", "generate", "pooling"],
    "convert": Literal["auto", "none", "embed", "classify"],
    "pooler_config": dict[str, Any],
}

#: Longest chat template, in bytes; all hosts announce theirs.
MAX_TEMPLATE_BYTES: Final = 256 * 1024

_SERVER: Final = "is not a model's: the gateway has its own settings (`tokenyard gateway --help`)"
_LOGS: Final = "has no effect: a gateway logs no requests"
_CODE: Final = "loads code into gateways, which run none that a models file names"
_ENDPOINTS: Final = "is not offered: a gateway has fixed endpoints"

#: Refused arguments of a front end, and the reasons.
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        [
            *("host", "port", "grpc_port", "uds", "root_path", "api_key", "middleware"),
            *("data_parallel_supervisor_port", "dp_supervisor_probe_interval_s"),
            *("dp_supervisor_probe_timeout_s", "dp_supervisor_probe_failure_threshold"),
            *("allow_credentials", "allowed_origins", "allowed_methods", "allowed_headers"),
            *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "enable_ssl_refresh"),
            *("ssl_cert_reqs", "ssl_ciphers", "uvicorn_log_level"),
            *("disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
            *("enable_request_id_headers", "disable_fastapi_docs", "enable_offline_docs"),
            *("h11_max_incomplete_event_size", "h11_max_header_count"),
            *("sse_keep_alive_interval", "enable_server_load_tracking"),
            *("enable_per_request_metrics", "enable_flash_late_interaction"),
        ],
        _SERVER,
    ),
    **dict.fromkeys(
        [
            *("max_log_len", "enable_log_requests", "enable_log_outputs", "enable_log_deltas"),
            "log_error_stack",
        ],
        _LOGS,
    ),
    **dict.fromkeys(["tool_parser_plugin", "reasoning_parser_plugin", "tool_server"], _CODE),
    **dict.fromkeys(
        ["enable_tokenizer_info_endpoint", "tokens_only", "enable_scale_out"], _ENDPOINTS
    ),
    "lora_modules": "list adapters instead",
    "served_model_name": "requests use the name of the table",
    "model": "give the model's own key path instead",
    "trust_request_chat_template": "a template is a program: only the model's own runs",
    "trust_request_mm_kwargs": "a worker reads media as its own arguments say",
}


def problem(name: str, value: Any) -> str:
    """Why a gateway cannot apply an announced argument; "" if it can."""
    kind = TAKEN.get(name, OF_ENGINE.get(name))
    if kind is None:
        return REFUSED.get(name, "is not known")
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""
