"""The arguments of vLLM's server that a models file may give, beside those that vLLM has."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest

from tests.unit.gateway.conftest import adder_tokenizer
from tokenyard.protocol.serve_args import OF_ENGINE, REFUSED, TAKEN

#: Arguments of the command itself.
OF_COMMAND = {"config", "grpc", "headless", "api_server_count", "model_tag"}
#: Arguments of the engine that are refused by name here, for their own reason.
OF_ENGINE_REFUSED = {"model", "served_model_name", "reasoning_parser"}


def test_each_argument_of_a_front_end_is_taken_or_refused() -> None:
    adder_tokenizer()  # sets vLLM's environment first
    from vllm import AsyncEngineArgs

    from gateway.frontend.models import default_args

    engine = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    front_end = set(vars(default_args())) - engine - OF_COMMAND
    assert len(front_end) > 20

    told = (set(TAKEN) | set(REFUSED)) - OF_ENGINE_REFUSED
    assert front_end - told == set(), "decide on these"
    assert told - front_end - engine == set(), "vLLM has these no longer"
    assert set(OF_ENGINE) <= engine
    assert not set(TAKEN) & set(REFUSED)


def test_the_arguments_are_found_where_a_newer_vllm_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adder_tokenizer()  # sets vLLM's environment first
    from gateway.frontend import models

    newer = ModuleType("cli_args")
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.common.cli_args", newer)
    assert models._cli_args() is newer
