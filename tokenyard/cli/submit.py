"""`tokenyard submit`: send prompts and print the answers."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, Final

import click

from tokenyard.cli.shared.connect import url_of
from tokenyard.cli.shared.console import say
from tokenyard.cli.shared.options import class_option, name_option, param_option
from tokenyard.cli.shared.printer import Printer
from tokenyard.cli.shared.request_owner import named
from tokenyard.client.options import LEVELS, Item, Prompt
from tokenyard.client.sync import DEFAULT_CONNECT_TIMEOUT_S, Client
from tokenyard.process.program import Exit, PlainCommand, YardChoice
from tokenyard.process.settings_options import words
from tokenyard.protocol.errors import BrokerUnavailable, NotDurable, RequestFailed, WaitTimeout
from tokenyard.protocol.wire import GENERATE, TASKS

#: Sampling parameters with options of their own.
_SAMPLING: Final = ("max_tokens", "temperature", "seed", "stop")
#: A prompt as it was given: text or token ids.
PromptArgument = str | list[int]


def _token_ids(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> list[list[int]]:
    wrong = "give token ids like 1,15,7"
    try:
        found = [[int(word) for word in words(value)] for value in values]
    except ValueError as error:
        raise click.BadParameter(wrong) from error
    if not all(found):
        raise click.BadParameter(wrong)
    return found


@click.command(cls=PlainCommand, short_help="Send prompts and print the answers.")
@click.argument("text", nargs=-1)
@click.option("--ids", multiple=True, callback=_token_ids, help="A prompt as token ids: 1,15,7.")
@click.option(
    "--file",
    # A line that is not UTF-8 fails alone, in its turn.
    type=click.File(encoding="utf-8", errors="surrogateescape"),
    help="File with one prompt a line; - is standard input.",
)
@click.option("--chat", is_flag=True, help="Each prompt is what the user of a chat says.")
@click.option("--system", help="What the system says first in these chats; implies --chat.")
@click.option(
    "--task",
    type=click.Choice(TASKS),
    default=GENERATE,
    show_default=True,
    help="What is made of each prompt: text, or numbers.",
)
@click.option("--query", default="", help="With --task score: what each prompt is compared with.")
@name_option("model", "The model; required if the yard has several.")
@name_option("tenant", "The tenant whose share and limits the requests count for.")
@class_option("normal")
@click.option(
    "--max-tokens",
    type=int,
    help="Most tokens of an answer.  [default: as vLLM's server, 16; of a chat what fits]",
)
@click.option("--temperature", type=float, help="0 always selects the most likely token.")
@click.option("--seed", type=int, help="Seed of sampling.")
@click.option("--stop", multiple=True, help="Text that ends an answer; may be repeated.")
@param_option("Any other parameter: name=JSON.")
@click.option(
    "--deadline-s",
    type=click.FloatRange(0, min_open=True),
    help="Seconds after which the request expires.",
)
@click.option("--refuse-late", is_flag=True, help="Refuse a request that would miss its deadline.")
@click.option(
    "--durability",
    type=click.Choice(LEVELS),
    default="memory",
    show_default=True,
    help="Where an accepted request is stored: the server's memory, its disk, or a replica.",
)
@click.option(
    "--cancel-on-disconnect",
    is_flag=True,
    help="Cancel unanswered requests when this command ends.",
)
@click.option("--stream", is_flag=True, help="Print tokens as they come, one prompt at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per answer.")
@click.option(
    "--verbose",
    is_flag=True,
    help="Print the id, client and queue position of a request (for one prompt, or with --stream).",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.001),
    default=120.0,
    show_default=True,
    help="Seconds to wait for the next answer or token.",
)
@click.option("--id", "request_id", help="Id of the request.  [default: random]")
@click.option("--client", "client_id", help="Client name.  [default: random]")
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    text: tuple[str, ...],
    ids: list[list[int]],
    file: IO[str] | None,
    chat: bool,
    system: str | None,
    params: dict[str, Any],
    as_json: bool,
    verbose: bool,
    timeout: float,
    request_id: str | None,
    client_id: str | None,
    **options: Any,
) -> None:
    """Send prompts to a yard and print the answers, in the order of the prompts.

    TEXT is a prompt; `-` reads one prompt per line from standard input, and --file from a file.
    Blank lines are skipped. Sampling parameters have vLLM's names.

    Examples:
      tokenyard submit "12+34="
      tokenyard submit --temperature 0 --max-tokens 64 --stream "Once upon a time"
      tokenyard submit --chat --system "Be brief." --stream "Hello!"
      tokenyard submit --param top_p=0.9 --param 'logit_bias={"7": -5}' "Hello"
      tokenyard submit --ids 1,15,7 --json
      tokenyard submit --task embed --model bert "a text" "another"
      tokenyard submit --task score --query "Where is Paris?" "In France." "Yes."
      tokenyard submit --file prompts.txt --json > answers.jsonl
      tokenyard submit --client ann --id q1 "12+34="    repeated, it runs only once
      tokenyard submit --deadline-s 5 --refuse-late --verbose "12+34="

    A request that failed or still runs is printed with its client: `tokenyard explain ID --client
    NAME` shows its timeline.

    Exit statuses:
      0  all requests completed        3  no usable broker or coordinator, or a full queue
      1  a request failed or expired   4  time-out (the requests continue)
      2  wrong usage, or a parameter that vLLM does not know
    """
    prompts = _prompts(text, ids, file)
    options = {name: value for name, value in options.items() if value not in {None, ()}}
    given = {name: options.pop(name) for name in _SAMPLING if name in options}
    is_chat = chat or system is not None
    if is_chat and ids:
        raise click.UsageError("--chat is for text, not for --ids")
    usual = {"max_tokens": None} if is_chat else {}  # as in vLLM's server
    options["params"] = usual | params | given
    only = prompts[0] if isinstance(prompts, list) and len(prompts) == 1 else None
    if request_id is not None and only is None:
        raise click.UsageError("--id is for one prompt")
    if "" in {request_id, client_id}:  # of a variable without a value, and not any
        raise click.UsageError("--id and --client must not be empty")
    choice: YardChoice = ctx.obj
    with Client(
        url_of(choice),
        yard=choice.yard,
        client_id=client_id,
        connect_timeout_s=min(timeout, DEFAULT_CONNECT_TIMEOUT_S),
        result_timeout_s=timeout,
    ) as client:
        printer = Printer(client.client_id, as_json=as_json, is_verbose=verbose)
        submission = _Submission(
            client, partial(_chat, system) if is_chat else _alone, options, printer
        )
        if only is not None:
            submission.one(only, request_id)
        elif options["stream"]:
            for prompt in prompts:
                submission.one(prompt)
        else:
            submission.many(prompts)
    printer.hint()
    ctx.exit(Exit.FAILED if printer.failed else Exit.OK)


def _prompts(
    text: Sequence[str], ids: Sequence[list[int]], file: IO[str] | None
) -> list[PromptArgument] | Iterator[PromptArgument]:
    """The prompts; a list, or an iterator if files are read."""
    files = [file] if file else []
    if "-" in text:
        files.insert(0, click.open_file("-", encoding="utf-8", errors="surrogateescape"))
    given: list[PromptArgument] = [*(each for each in text if each != "-"), *ids]
    if files:
        return itertools.chain(given, *(_lines(each) for each in files))
    if not given or "" in given:
        empty = ", not an empty one" if given else ""
        raise click.UsageError(f'give a prompt{empty}: tokenyard submit "12+34="')
    return given


def _alone(prompt: PromptArgument) -> Prompt:
    return prompt


def _chat(system: str | None, prompt: PromptArgument) -> Prompt:
    said = {"system": system, "user": prompt}
    return [{"role": role, "content": text} for role, text in said.items() if text is not None]


def _text(prompt: PromptArgument) -> PromptArgument:
    """The prompt for JSON: a file may contain bytes that are not text."""
    if isinstance(prompt, str):
        return prompt.encode(errors="backslashreplace").decode()
    return prompt


def _lines(file: IO[str]) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in file if line.strip())


@dataclass(frozen=True, slots=True)
class _Submission:
    """What all prompts of one command share."""

    client: Client
    as_asked: Callable[[PromptArgument], Prompt]
    options: dict[str, Any]
    printer: Printer

    def one(self, prompt: PromptArgument, request_id: str | None = None) -> None:
        """Send one prompt, and wait for its answer."""
        client, printer = self.client, self.printer
        name = request_id or secrets.token_hex(8)
        item: Item = {"prompt": self.as_asked(prompt), "id": name}
        ours = f"request {name!r} of client {client.client_id!r}"
        later = f"for its result: tokenyard result {named(client.client_id, name)}"
        with self._explain_interruption(f"{ours} continues if it was accepted; {later}"):
            [handle] = client.submit_many([item], **self.options)
        with self._explain_interruption(f"{ours} continues; {later}"):
            printer.accepted(handle)
            if self.options["stream"]:
                with contextlib.suppress(RequestFailed):  # the result has the error
                    for delta in handle:
                        printer.delta(delta)
            result = handle.wait()
        printer.result(result, index=0, prompt=_text(prompt))

    def many(self, prompts: Iterable[PromptArgument]) -> None:
        """Send all prompts, and print the answers in their order."""
        sent: dict[int, PromptArgument] = {}
        client_id = self.client.client_id

        def remembered() -> Iterator[Prompt]:
            for index, prompt in enumerate(prompts):
                sent[index] = prompt
                yield self.as_asked(prompt)

        with self._explain_interruption(
            f"Unanswered requests of client {client_id!r} continue: tokenyard requests"
            f" --client {client_id}"
        ):
            for index, result in self.client.map(remembered(), ordered=True, **self.options):
                self.printer.result(result, index=index, prompt=_text(sent.pop(index)))

    @contextlib.contextmanager
    def _explain_interruption(self, message: str) -> Iterator[None]:
        """If waiting ends without an answer, print how to get it later."""
        try:
            yield
        except (KeyboardInterrupt, WaitTimeout, BrokerUnavailable, NotDurable):
            self.printer.stop()
            if not self.options["cancel_on_disconnect"]:
                say(message, err=True)
            raise
