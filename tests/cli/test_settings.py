"""Each setting of a program is an option of its command, and has a variable."""

from __future__ import annotations

import dataclasses

import click
import pytest

import coordinator.__main__
import gateway.__main__
import tokenyard.board.__main__
import worker.__main__
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.http_settings import BoardSettings
from tokenyard.protocol.settings import CoordinatorSettings, WorkerSettings

PROGRAMS = {
    "board": (tokenyard.board.__main__.main, BoardSettings),
    "coordinator": (coordinator.__main__.main, CoordinatorSettings),
    "gateway": (gateway.__main__.main, GatewaySettings),
    "worker": (worker.__main__.main, WorkerSettings),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_setting_is_an_option_with_a_variable(name: str) -> None:
    command, settings = PROGRAMS[name]
    options = {one.name: one.envvar for one in command.params if isinstance(one, click.Option)}
    fields = {field.name for field in dataclasses.fields(settings)}
    assert len(fields) > 10
    assert fields - options.keys() == set()
    for field in fields - {"redis_url", "yard"}:
        assert options[field] == f"TOKENYARD_{name.upper()}_{field.upper()}"
