"""`tokenyard completion`: scripts for completion in the shell."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from tokenyard.cli.shared.completion import COMPLETION
from tokenyard.cli.shared.console import say
from tokenyard.process.program import PlainCommand

ABOUT: Final = """Print a script with which the shell completes commands, options and names.

Names of models, workers and batch jobs come from the broker, if it answers within half a second.
Options before the command count: `tokenyard --yard test pause --model <TAB>`.

\b
Examples:
  eval "$(tokenyard completion bash)"                        now
  tokenyard completion bash > ~/.local/share/bash-completion/completions/tokenyard
  tokenyard completion zsh > ~/.zfunc/_tokenyard             with fpath+=~/.zfunc
  tokenyard completion fish > ~/.config/fish/completions/tokenyard.fish
"""
_PROGRAM: Final = "tokenyard"


@click.command(cls=PlainCommand, help=ABOUT, short_help="Print a script for shell completion.")
@click.argument("shell", metavar="SHELL", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script for a shell: SHELL is bash (4.4 or newer), zsh or fish."""
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    root = ctx.find_root().command
    say(kind(root, {}, _PROGRAM, COMPLETION).source())
