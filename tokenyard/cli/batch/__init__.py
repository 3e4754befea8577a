"""`tokenyard batch`: run files of requests."""

from __future__ import annotations

from typing import Final

import click

from tokenyard.cli import LazyGroup

#: The place of each command.
COMMANDS: Final = {
    "run": "tokenyard.cli.batch.run:run",
    "submit": "tokenyard.cli.batch.jobs:submit",
    "worker": "tokenyard.cli.batch.worker:worker",
    "list": "tokenyard.cli.batch.jobs:list_jobs",
    "status": "tokenyard.cli.batch.jobs:status",
    "cancel": "tokenyard.cli.batch.jobs:cancel",
    "resume": "tokenyard.cli.batch.jobs:resume",
    "results": "tokenyard.cli.batch.jobs:results",
    "logs": "tokenyard.cli.batch.jobs:logs",
}


@click.group(cls=LazyGroup, places=COMMANDS, short_help="Run files of requests, here or by RQ.")
def batch() -> None:
    """Batch jobs: a file of requests in, a file of answers out, one for each line.

    A line has the form of the OpenAI batch API (custom_id, method, url, body) or a plain one (id,
    one of prompt, tokens and messages, and parameters). Files named .gz and .zst are compressed.
    `run` runs a job here; `submit` submits it to RQ, and `worker` runs submitted jobs.

    Examples:
      tokenyard batch run in.jsonl -o out.jsonl
      tokenyard batch run in.jsonl.gz -o out.jsonl.gz --model adder --param temperature=0
      tokenyard batch run in.jsonl --dry-run
      tokenyard batch submit in.jsonl -o out.jsonl
      tokenyard batch status batch_0f3a...
    """
