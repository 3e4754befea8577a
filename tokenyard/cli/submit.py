"""`tokenyard submit`: ask, and print the answers."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final

import click

from tokenyard.cli.shared.answers import Printer
from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.parameters import named_values
from tokenyard.cli.whose import named
from tokenyard.client.durability import LEVELS, Durability
from tokenyard.client.options import Item, SharedOptions
from tokenyard.client.sync import DEFAULT_CONNECT_TIMEOUT_S, Client, Handle
from tokenyard.process.program import Exit, PlainCommand, YardChoice, words
from tokenyard.protocol.errors import BrokerUnavailable, NotDurable, RequestFailed, WaitTimeout

ABOUT: Final = """Send prompts to a yard and print the answers, in the order of the prompts.

TEXT is a prompt; `-` reads one prompt a line from standard input, and --file from a file. Blank
lines are left out. Sampling parameters are vLLM's, by their own names.

\b
Examples:
  tokenyard submit "12+34="
  tokenyard submit --temperature 0 --max-tokens 64 --stream "Once upon a time"
  tokenyard submit --param top_p=0.9 --param 'logit_bias={"7": -5}' "Hello"
  tokenyard submit --ids 1,15,7 --json
  tokenyard submit --file prompts.txt --json > answers.jsonl
  tokenyard submit --client ann --id q1 "12+34="    ask again, and q1 still runs only once
  tokenyard submit --deadline-s 5 --refuse-late --verbose "12+34="

A request that failed or was not waited for is named, with the client that it was asked under:
`tokenyard explain ID --client NAME` says what became of it.

\b
Exit statuses:
  0  all requests completed        3  no usable broker or coordinator
  1  a request failed or expired   4  time is over (the requests go on)
  2  wrong usage, or a parameter that vLLM does not know
"""


#: A prompt on the command line: text or token ids.
Asked = str | list[int]


def _token_ids(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[list[int]]:
    try:
        return [[int(word) for word in words(value)] for value in values]
    except ValueError as error:
        raise click.BadParameter("give token ids like 1,15,7") from error


@click.command(cls=PlainCommand, help=ABOUT, short_help="Send prompts and print the answers.")
@click.argument("text", nargs=-1)
@click.option("--ids", multiple=True, callback=_token_ids, help="A prompt as token ids: 1,15,7.")
@click.option(
    "--file",
    # A line that is no text is refused alone, when it is its turn.
    type=click.File(encoding="utf-8", errors="surrogateescape"),
    help="File with one prompt a line; - is standard input.",
)
@click.option("--model", default="", help="Which model; needed where the yard holds several.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.  [default: vLLM's, 16]")
@click.option("--temperature", type=float, help="0 always takes the likeliest token.")
@click.option("--seed", type=int, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="Text that ends an answer; can be given often.")
@click.option(
    "--param",
    "params",
    multiple=True,
    callback=named_values,
    help="Any other parameter: name=JSON.",
)
@click.option(
    "--deadline-s",
    type=click.FloatRange(0, min_open=True),
    help="Seconds from now after which an answer is of no use.",
)
@click.option(
    "--refuse-late", is_flag=True, help="Refuse at once what would wait beyond its deadline."
)
@click.option(
    "--durability",
    type=click.Choice(LEVELS),
    default="memory",
    show_default=True,
    help="What an accepted request must have reached: the server's memory, its disk, or a replica.",
)
@click.option(
    "--cancel-on-disconnect", is_flag=True, help="Cancel what is not answered when this ends."
)
@click.option("--stream", is_flag=True, help="Print tokens as they come, prompt after prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each answer.")
@click.option(
    "--verbose",
    is_flag=True,
    help="Say the request's id and client, and where it stands in the line (of one prompt, or with"
    " --stream).",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.001),
    default=120.0,
    show_default=True,
    help="Seconds to wait while nothing comes.",
)
@click.option("--id", "request_id", help="Id of the one request.  [default: random]")
@click.option("--client", "client_id", help="Name to ask under.  [default: random]")
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    text: tuple[str, ...],
    ids: list[list[int]],
    file: IO[str] | None,
    model: str,
    params: dict[str, Any],
    deadline_s: float | None,
    refuse_late: bool,
    durability: Durability,
    cancel_on_disconnect: bool,
    stream: bool,
    as_json: bool,
    verbose: bool,
    timeout: float,
    request_id: str | None,
    client_id: str | None,
    **sampling: Any,
) -> None:
    """Ask, print, and set the exit status."""
    prompts = _prompts(text, ids, file)
    given = {name: value for name, value in sampling.items() if value not in {None, ()}}
    options: SharedOptions = {
        "model": model,
        "params": params | given,
        "stream": stream,
        "refuse_late": refuse_late,
        "durability": durability,
        "cancel_on_disconnect": cancel_on_disconnect,
    }
    if deadline_s is not None:
        options["deadline_s"] = deadline_s
    only = prompts[0] if isinstance(prompts, list) and len(prompts) == 1 else None
    if request_id is not None and only is None:
        raise click.UsageError("--id is for one prompt")
    choice: YardChoice = ctx.obj
    with Client(
        url_of(choice),
        yard=choice.yard,
        client_id=client_id,
        connect_timeout_s=min(timeout, DEFAULT_CONNECT_TIMEOUT_S),
        result_timeout_s=timeout,
    ) as client:
        printer = Printer(client.client_id, as_json=as_json, is_verbose=verbose)
        if only is not None:
            _ask_one(client, only, options, request_id, printer)
        elif stream:
            for prompt in prompts:
                _ask_one(client, prompt, options, None, printer)
        else:
            _ask_many(client, prompts, options, printer)
    printer.hint()
    ctx.exit(Exit.FAILED if printer.failed else Exit.OK)


def _prompts(
    text: Sequence[str], ids: Sequence[list[int]], file: IO[str] | None
) -> list[Asked] | Iterator[Asked]:
    """A list of what was given, or an endless supply where a file is read."""
    files: list[IO[str]] = [_stdin()] if "-" in text else []
    files += [file] if file else []
    given: list[Asked] = [*(each for each in text if each != "-"), *ids]
    if files:
        return itertools.chain(given, *(_lines(each) for each in files))
    if not given:
        raise click.UsageError('give a prompt: tokenyard submit "12+34="')
    return given


def _stdin() -> IO[str]:
    return click.open_file("-", encoding="utf-8", errors="surrogateescape")


def _lines(file: IO[str]) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in file if line.strip())


def _ask_one(
    client: Client, prompt: Asked, options: SharedOptions, request_id: str | None, printer: Printer
) -> None:
    name = request_id or secrets.token_hex(8)
    item: Item = {"prompt": prompt, "id": name}
    ours = f"request {name!r} of client {client.client_id!r}"
    later = f"for its result: tokenyard result {named(client.client_id, name)}"
    with _told_where_it_is(printer, options, f"{ours} goes on, if it was accepted; {later}"):
        [handle] = client.submit_many([item], **options)
    with _told_where_it_is(printer, options, f"{ours} goes on; {later}"):
        printer.accepted(handle)
        if options["stream"]:
            _follow(handle, printer)
        result = handle.wait()
    printer.result(prompt, 0, result)


@contextlib.contextmanager
def _told_where_it_is(printer: Printer, options: SharedOptions, goes_on: str) -> Iterator[None]:
    """Where the wait for an answer ends without one, say how to get it all the same."""
    try:
        yield
    except (KeyboardInterrupt, WaitTimeout, BrokerUnavailable, NotDurable):
        printer.stop()
        if not options["cancel_on_disconnect"]:
            say(goes_on, err=True)
        raise


def _follow(handle: Handle, printer: Printer) -> None:
    try:
        for delta in handle:
            printer.delta(delta)
    except RequestFailed:
        return  # the result says so, too


def _ask_many(
    client: Client, prompts: Iterable[Asked], options: SharedOptions, printer: Printer
) -> None:
    sent: dict[int, Asked] = {}
    goes_on = (
        f"What is unanswered of client {client.client_id!r} goes on; to see it: tokenyard requests"
        f" --client {client.client_id}"
    )

    def remembered() -> Iterator[Asked]:
        for index, prompt in enumerate(prompts):
            sent[index] = prompt
            yield prompt

    with _told_where_it_is(printer, options, goes_on):
        for index, result in client.map(remembered(), ordered=True, **options):
            printer.result(sent.pop(index), index, result)
