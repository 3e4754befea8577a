"""docs/commands.md and `--help` agree about every command."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from tests.docs.pages import page, rows, section
from tokenyard.broker.url import SCHEMES
from tokenyard.cli import EPILOG, main
from tokenyard.process.program import REDIS_URL_HELP, Exit

COMMANDS = page("docs/commands.md")
#: Options of several commands, by the page's words for them.
SHARED = dict(re.findall(r"\*(options of \w+)\*: ((?:`[^`]+`\s?)+)", COMMANDS))
#: Commands whose options are settings; tests/docs compares those with their tables.
PROGRAMS = {"board", "bridge", "coordinator", "gateway", "worker"}
CODE = re.compile(r"`([^`]+)`")
STATUSES = re.compile(r"Exit statuses:\n(?P<lines>(?: +\d  .*\n?)+)")


def leaves(
    command: click.Command = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Every command without subcommands, by its words."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner
            yield from leaves(inner, (*path, name))
    else:
        yield " ".join(path), command


def shown(name: str, command: click.Command) -> str:
    """The command with its arguments, as the page shows it: a choice by its name."""
    context = click.Context(command)
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    texts = [
        str(one.name).upper() if isinstance(one.type, click.Choice) else one.make_metavar(context)
        for one in arguments
    ]
    return " ".join([name, *texts])


def options(command: click.Command) -> set[str]:
    flags = [one for one in command.params if isinstance(one, click.Option)]
    return {text for one in flags for text in (*one.opts, *one.secondary_opts)}


def statuses(name: str) -> list[int]:
    """The exit statuses in the help of a command, or else of its group."""
    words = name.split()
    for count in (len(words), 1):
        context = click.Context(by_path(words[:count]), info_name="x")
        text = re.sub(r"(?<=\S)   +(?=\d  )", "\n  ", context.command.get_help(context))
        if found := STATUSES.search(text + "\n"):
            return sorted(
                int(line) for line in re.findall(r"^ +(\d)  ", found["lines"], re.MULTILINE)
            )
    return []


def by_path(words: list[str]) -> click.Command:
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        inner = command.get_command(click.Context(command), word)
        assert inner
        command = inner
    return command


def told() -> dict[str, tuple[set[str], list[int]]]:
    """Options and statuses on the page, by command."""
    found = {}
    for row in rows(COMMANDS):
        if len(row) == 4:
            command, cell, status, _ = row
            for words, meant in SHARED.items():
                cell = cell.replace(words, meant)
            known = [int(number) for number in status.split()]
            found[command.strip("`")] = (set(CODE.findall(cell)), known)
    return found


LEAVES = dict(leaves())


def test_the_page_has_exactly_the_commands() -> None:
    assert set(told()) == {
        shown(name, command) if name not in PROGRAMS else name for name, command in LEAVES.items()
    }


@pytest.mark.parametrize("name", sorted(LEAVES.keys() - PROGRAMS))
def test_options_and_statuses_agree(name: str) -> None:
    said_options, said_statuses = told()[shown(name, LEAVES[name])]
    assert said_options == options(LEAVES[name])
    assert said_statuses == statuses(name)


@pytest.mark.parametrize("name", sorted(LEAVES.keys() - PROGRAMS))
def test_help_explains_each_option(name: str) -> None:
    command = LEAVES[name]
    text = command.get_help(click.Context(command, info_name=f"tokenyard {name}"))
    for one in command.params:
        if isinstance(one, click.Option):
            assert one.help, one.name
            assert one.opts[0] in text


def test_the_page_has_the_statuses_of_the_program() -> None:
    known = {int(row[0]) for row in rows(section(COMMANDS, "## Exit statuses"))}
    assert known == set(Exit)
    assert {int(number) for number in re.findall(r"(?:^|[,:]\s)(\d+) ", EPILOG)} == known
    for name in LEAVES:
        assert set(statuses(name)) <= known


def test_help_and_page_name_all_schemes_of_urls() -> None:
    """Given the schemes of `tokenyard.broker.url`, I expect help and page to name them."""
    several = ("redis+sentinel", "redis+cluster")
    settings = section(page("docs/settings.md"), "## All programs")
    for scheme in (*SCHEMES, *several):
        assert f"{scheme}://" in REDIS_URL_HELP
        assert f"{scheme}://" in settings
