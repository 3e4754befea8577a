"""The options of a job, for `tokenyard batch run` and `batch submit`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from tokenyard.batch.files import UnreadableFile
from tokenyard.batch.outputs import OutputInUse
from tokenyard.batch.rq import is_installed
from tokenyard.batch.runner import BatchBroken
from tokenyard.batch.state import DEFAULT_RESULT_TTL_S, TABLE_TASKS
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.options import (
    class_option,
    milliseconds,
    name_option,
    param_option,
    with_options,
)
from tokenyard.process.program import Exit, YardChoice
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.texts import pip_install
from tokenyard.protocol.wire import GENERATE


def seconds(text: str) -> float:
    """The type of an option: a time like 90, 90s, 15m, 24h or 7d."""
    return milliseconds(text) / 1000


def whole_seconds(text: str) -> int:
    """The same, without fractions."""
    return int(seconds(text))


def need_rq() -> None:
    """Raises `SettingsError` where RQ is not installed. RQ is imported when a command runs."""
    if not is_installed():
        raise SettingsError([f"this command needs RQ: {pip_install('batch')}"])


@contextmanager
def file_errors_in_one_line(ctx: click.Context, missing: Exit = Exit.USAGE) -> Iterator[None]:
    """Print an error of the files in one line and exit: ``missing`` for a missing file, else 1."""
    try:
        yield
    except (BatchBroken, OutputInUse, UnreadableFile) as error:
        choice: YardChoice = ctx.obj
        if choice.debug:
            raise
        say(f"Error: {error}", err=True)
        is_missing = isinstance(error.__cause__, FileNotFoundError)
        ctx.exit(missing if is_missing else Exit.FAILED)


#: The options of a job.
spec_options: Final = with_options(
    click.argument("input_path", metavar="INPUT", type=click.Path(path_type=Path)),
    click.option(
        "-o", "--output", type=click.Path(path_type=Path), help="Where results are written."
    ),
    click.option(
        "--errors",
        type=click.Path(path_type=Path),
        help="Where errors are written.  [default: out.errors.jsonl for out.jsonl]",
    ),
    click.option(
        "--task",
        type=click.Choice(TABLE_TASKS),
        default=GENERATE,
        show_default=True,
        help="What is made of each row of a table.",
    ),
    click.option("--column", default="", help="INPUT is a table, with the prompts in this column."),
    click.option("--prompt", default="", help="The same, as a prompt: 'Summarize: {text}'."),
    click.option("--message", default="", help="The same, as a user's message in a chat."),
    click.option(
        "--image", default="", help="With --message: the column of a picture or its path."
    ),
    click.option(
        "--into",
        default="",
        metavar="COLUMN",
        help="Column for the answers to the rows.  [default: generated_text, embedding, ...]",
    ),
    name_option("model", "Model of lines without one."),
    param_option("Default sampling parameter of the lines: name=JSON."),
    class_option("low"),
    click.option(
        "--max-in-flight",
        "window",
        type=click.IntRange(1),
        help="Most requests in flight.  [default: twice the workers' places, at least 1000]",
    ),
    name_option("tenant", "Tenant of lines without one."),
    click.option("--ordered", is_flag=True, help="Write answers in the order of the lines."),
    click.option(
        "--completion-window",
        "completion_window_s",
        type=seconds,
        metavar="TIME",
        default="0",
        help="Lines without an answer after this time expire: 24h.  [default: no limit]",
    ),
    click.option(
        "--result-ttl",
        "result_ttl_s",
        type=whole_seconds,
        metavar="TIME",
        default=str(DEFAULT_RESULT_TTL_S),
        show_default=True,
        help="How long the yard keeps answers for a killed job.",
    ),
    click.option(
        "--overwrite", is_flag=True, help="Start over: delete the results and errors of OUTPUT."
    ),
)
