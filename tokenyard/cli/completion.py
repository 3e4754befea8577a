"""`tokenyard completion`: scripts for completion in the shell."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from tokenyard.cli.shared.completion import COMPLETION
from tokenyard.cli.shared.console import say
from tokenyard.process.program import PlainCommand

_SHELLS: Final = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(cls=PlainCommand, short_help="Print a script for shell completion.")
@click.argument("shell", metavar="SHELL", type=click.Choice([*_SHELLS]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script with which the shell completes commands, options and names.

    Names of models, workers and batch jobs come from the broker, if it answers within half a
    second. Options before the command count: `tokenyard --yard test pause --model <TAB>`.

    Examples:
      eval "$(tokenyard completion bash)"                        now
      tokenyard completion bash > ~/.local/share/bash-completion/completions/tokenyard
      tokenyard completion zsh > ~/.zfunc/_tokenyard             with fpath+=~/.zfunc
      tokenyard completion fish > ~/.config/fish/completions/tokenyard.fish
    """
    root = ctx.find_root().command
    say(_SHELLS[shell](root, {}, "tokenyard", COMPLETION).source())
