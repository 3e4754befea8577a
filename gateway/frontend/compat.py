"""What vLLM has moved or renamed among the versions that gateways run with."""

from __future__ import annotations

import importlib
from typing import Any


def _found(name: str, *modules: str) -> Any:
    """An object of vLLM's, from the first of these modules that has it: the newest place first."""
    for module in modules[:-1]:
        try:
            return getattr(importlib.import_module(f"vllm.{module}"), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    return getattr(importlib.import_module(f"vllm.{modules[-1]}"), name)


_API_SERVER = "entrypoints.openai.api_server"
build_app = _found("build_app", "entrypoints.launchers.app", _API_SERVER)
init_app_state = _found("init_app_state", "entrypoints.launchers.api_server.app_state", _API_SERVER)
make_arg_parser = _found(
    "make_arg_parser",
    "entrypoints.common.cli_args",  # from 0.33 on
    "entrypoints.launchers.cli_args",
    "entrypoints.openai.cli_args",  # up to 0.28
)
create_error_response = _found(
    "create_error_response",
    "entrypoints.serve",
    "entrypoints.serve.exception_handling.error_response",
    "entrypoints.serve.utils.error_response",
)
