"""``python -m gateway.bridge``, which is also ``tokenyard bridge``."""

from __future__ import annotations

from typing import Final

from tokenyard.process.extras import refuse
from tokenyard.protocol.gateway_settings import BridgeSettings

try:
    import click
    import zmq  # noqa: F401 - a missing one is told in one sentence

    from tokenyard.process.program import HTTP_TEXTS, program
except ModuleNotFoundError as error:
    refuse(error)

TEXTS: Final = {
    "name": HTTP_TEXTS["name"],
    "model": "Name of the model in the yard.  [default: its only one]",
    "front": "Start and watch this front end, with the arguments after --.",
    "handshake": "Serve front ends that run already: tcp://127.0.0.1:PORT,...",
    "max_model_len": "Tokens of prompt and answer; 0: as the yard's workers say.",
    "task": "What the model does; auto: as the yard's workers say.",
    "vllm_version": "Of front ends that run already.",
    "id_prefix": "An X-Request-Id with this prefix names its answer.",
    "result_ttl_s": "How long such an answer is kept.",
    "journal_dir": "Folder of what front ends wait for.  [default: that of the yard's data]",
    "key_check_port": "Port of key checks for a proxy before the front end; 0: none.",
    "grace_s": "On SIGTERM, answers may finish for so long; what comes is refused.",
    "gone_s": "A front end of its own starts again after so long without a bridge.",
}


def run(settings: BridgeSettings) -> int:
    """Put the queue behind a front end of vLLM.

    The front end takes it for its engine, and stays unmodified; behind it are all workers of the
    yard. It is for loopback only: docs/bridge.md shows a proxy with keys before it.

    Examples:
      tokenyard bridge --front vllm-rs -- --port 8000
      tokenyard bridge --front vllm -- --port 8000 --enable-log-requests
      tokenyard bridge --handshake tcp://127.0.0.1:29550
    """
    if settings.front != "none":
        from gateway.bridge.unit import run_unit

        return run_unit(settings)
    from gateway.bridge.server import serve

    return serve(settings)


main = program(
    "bridge",
    BridgeSettings,
    run,
    texts=TEXTS,
    arguments=[click.Argument(["front_args"], nargs=-1, type=click.UNPROCESSED)],
)

if __name__ == "__main__":
    main()
