"""``python -m tokenyard.board``, which is also ``tokenyard board``."""

from __future__ import annotations

from typing import Final

from tokenyard.process.extras import refuse
from tokenyard.protocol.http_settings import BoardSettings

try:
    from tokenyard.process.program import HTTP_TEXTS, program
except ModuleNotFoundError as error:
    refuse(error)

TEXTS: Final = {
    **HTTP_TEXTS,
    "hosts": "Names by which browsers reach it beside localhost, separated by commas:"
    " board.example.com, or https://board.example.com behind a proxy with TLS.",
    "content": "The least role that sees prompts and answers.",
    "session_s": "How long a login lasts.",
    "max_streams": "Open pages that are kept up to date.",
    "max_reads": "Reads and actions at once; more wait.",
    "wait_s": "They wait for so long at most.",
    "grace_s": "On SIGTERM, answers may finish for so long.",
}


def run(settings: BoardSettings) -> int:
    """Serve the board: the yard in a browser, at /board.

    A gateway serves it, too. On loopback it asks for no key, and everybody who reaches it is an
    admin; elsewhere one logs in with a key that has a role (`tokenyard keys create --role viewer`).
    docs/board.md tells what each role may do.

    Examples:
      tokenyard board
      tokenyard board --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
      tokenyard board --keys required --hosts https://board.example.com     behind a proxy
    """
    # Late, so that `tokenyard --help`, which lists this command, stays quick.
    try:
        from tokenyard.board.server import serve
    except ModuleNotFoundError as error:
        refuse(error)
    return serve(settings)


main = program("board", BoardSettings, run, texts=TEXTS)

if __name__ == "__main__":
    main()
