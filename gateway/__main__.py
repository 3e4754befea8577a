"""``python -m gateway``, which is also ``tokenyard gateway``."""

from __future__ import annotations

from typing import Final

from tokenyard.process.extras import refuse, why_no_gateway
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.gateway_settings import GatewaySettings

try:
    from tokenyard.process.program import HTTP_TEXTS, program
except ModuleNotFoundError as error:
    refuse(error)

TEXTS: Final = {
    **HTTP_TEXTS,
    "record_ttl_s": "How long an idempotency key is known and a stream can be resumed.",
    "max_body_bytes": "Most bytes of one request.",
    "max_unfinished_bytes": "Most bytes of all unfinished requests; a client may have a quarter.",
    "max_body_items": "Most values in the lists and objects of a request, such as token ids.",
    "max_grammar_bytes": "Most bytes of a constraint on the text, such as a JSON schema.",
    "max_tokenize_bytes": "Most bytes of a request that only tokenizes, counts or detokenizes.",
    "files_dir": "Folder of files and batches, the same for all gateways and batch workers.",
    "files_url": "A bucket in its place: s3://bucket/prefix.",
    "max_file_bytes": "Most bytes of one uploaded file.",
    "max_tenant_files": "Most files of one tenant, with the outputs of its batches.",
    "max_tenant_bytes": "Most bytes of these files together.",
    "keep_alive_s": "Silence on a stream after which a comment is sent.",
    "grace_s": "On SIGTERM, answers may finish for so long; then streams end.",
    "without_leader_s": "Requests are refused (503) after so long without a coordinator.",
    "refresh_s": "Pause between two looks at the yard's models.",
    "model_paths": "Where models lie here, if not where hosts have them: NAME=PATH,...",
    "hosts": "Names by which it is reached beside localhost, separated by commas; with keys, those"
    " of the board: gateway.example.com, or https://gateway.example.com behind a proxy with TLS.",
    "origins": "Sites whose pages may use the API (CORS): https://app.example.com,... or *.",
    "board": "Serve the board at /board.",
    "board_content": "The least role that sees prompts and answers on the board.",
    "board_session_s": "How long a login at the board lasts.",
    "board_max_streams": "Open pages of the board that are kept up to date.",
    "allowed_media_domains": "Hosts from which media are fetched: images.example.com,...",
    "trust_remote_code": "Run code that comes with a model, where the models file trusts it.",
}


def run(settings: GatewaySettings) -> int:
    """Run a gateway, which serves the yard by OpenAI's HTTP API.

    Any number of gateways may run side by side: all state is in Redis. It needs no GPU and loads no
    weights, but the models' tokenizers and configurations, at the paths of the models file.

    Examples:
      tokenyard gateway
      tokenyard --redis-url redis://broker:6379 gateway --port 8000
    """
    if why := why_no_gateway():
        raise SettingsError([why])
    # Late, so that `tokenyard --help`, which lists this command, stays quick.
    from gateway.server import serve

    serve(settings)


main = program("gateway", GatewaySettings, run, texts=TEXTS)

if __name__ == "__main__":
    main()
