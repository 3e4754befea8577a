"""`tokenyard batch worker`: run submitted batch jobs."""

from __future__ import annotations

import click
from setproctitle import setproctitle

from tokenyard.broker.connection import connected
from tokenyard.broker.url import batch_url
from tokenyard.cli.batch.options import need_rq
from tokenyard.cli.shared.connect import url_of
from tokenyard.process.logs import start_logging
from tokenyard.process.program import PlainCommand, YardChoice
from tokenyard.process.settings_options import words
from tokenyard.protocol.gateway_settings import GatewaySettings


@click.command(cls=PlainCommand, short_help="Run submitted jobs.")
@click.option("--burst", is_flag=True, help="End when no job waits.")
@click.option("--name", default="", help="Name of this worker in RQ.  [default: random]")
@click.option(
    "--model-paths",
    type=words,
    default="",
    envvar="TOKENYARD_GATEWAY_MODEL_PATHS",
    help="For batches of a gateway, as its option: where models lie here, NAME=PATH,...",
)
@click.option(
    "--trust-remote-code/--no-trust-remote-code",
    default=False,
    envvar="TOKENYARD_GATEWAY_TRUST_REMOTE_CODE",
    help="For batches of a gateway, as its option.",
)
@click.option(
    "--allowed-media-domains",
    type=words,
    default="",
    envvar="TOKENYARD_GATEWAY_ALLOWED_MEDIA_DOMAINS",
    help="For batches of a gateway, as its option.",
)
@click.option(
    "--commands/--no-commands",
    "runs_commands",
    default=True,
    show_default=True,
    help="Run the commands that jobs name for their end; else only call URLs.",
)
@click.pass_context
def worker(
    ctx: click.Context,
    burst: bool,
    name: str,
    model_paths: tuple[str, ...],
    trust_remote_code: bool,
    allowed_media_domains: tuple[str, ...],
    runs_commands: bool,
) -> None:
    """Run batch jobs, one at a time; start several for more.

    It is RQ's worker with JSON instead of pickle. Each job runs in its own process, which uses no
    GPU. SIGTERM requeues a running job, and another worker continues it; after SIGKILL the next
    worker of this host continues immediately, one elsewhere after a minute.

    Batches of a gateway (docs/gateway.md) need on this host what the gateway needs: the extra
    `gateway` and the models' tokenizers.

    Examples:
      tokenyard batch worker
      tokenyard batch worker --burst     until no job is left
    """
    need_rq()
    from tokenyard.batch.rq.work import WorkerContext
    from tokenyard.batch.rq.worker import run_worker

    choice: YardChoice = ctx.obj
    url = url_of(choice)
    as_gateway = GatewaySettings(
        redis_url=url,
        yard=choice.yard,
        name="batch-worker",
        model_paths=model_paths,
        allowed_media_domains=allowed_media_domains,
    )
    WorkerContext.model_paths = as_gateway.paths
    WorkerContext.trust_remote_code = trust_remote_code
    WorkerContext.allowed_media_domains = as_gateway.allowed_media_domains
    WorkerContext.runs_commands = runs_commands
    start_logging(url, debug=choice.debug)
    setproctitle(f"tokenyard batch worker {choice.yard}")
    with connected(batch_url(url)) as connection:
        connection.ping()
        run_worker(url, choice.yard, connection, name=name, burst=burst)
