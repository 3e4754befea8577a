"""Settings of a gateway and of a bridge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tokenyard.protocol.http_settings import MAX_STREAMS, SESSION_S, ContentRule, HttpSettings, Port
from tokenyard.protocol.sampling import MAX_GRAMMAR_BYTES
from tokenyard.protocol.settings import (
    AtLeastOne,
    NotNegative,
    Positive,
    ProgramSettings,
    default_name,
)

#: The longest prompt of token ids has as many; also for a line of a batch.
MAX_BODY_ITEMS: Final = 250_000
#: A host as URLs have it, in ASCII, and its port where that is not the usual one.
_DOMAIN: Final = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
_ORIGIN: Final = re.compile("[a-z][a-z0-9+.-]*://[^/,A-Z ]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(HttpSettings):
    """What a gateway needs to know. Units stand in the names."""

    name: str = field(default_factory=lambda: default_name("gateway"))
    port: Port = 8000
    #: How long an idempotency key is known, and a stream can be taken up again.
    record_ttl_s: AtLeastOne = 86_400
    max_body_bytes: AtLeastOne = 4 * 1024 * 1024
    #: Most bytes of all bodies that have not come to their end; a client may have a quarter.
    max_unfinished_bytes: AtLeastOne = 256 * 1024 * 1024
    #: Most values in the lists and objects of a body, such as token ids of a prompt.
    max_body_items: AtLeastOne = MAX_BODY_ITEMS
    #: Most bytes of a body that is only tokenized, counted or detokenized.
    max_tokenize_bytes: AtLeastOne = 512 * 1024
    #: Most bytes of a constraint on the text (`response_format`, tools), as JSON.
    max_grammar_bytes: AtLeastOne = MAX_GRAMMAR_BYTES
    #: Folder of files and batches, which all gateways and batch workers share, or a bucket in its
    #: place: "s3://bucket/prefix". Without either there are no files and no batches.
    files_dir: Path | None = None
    files_url: str = ""
    max_file_bytes: AtLeastOne = 512 * 1024 * 1024
    #: Of one tenant, with the outputs of its batches.
    max_tenant_files: AtLeastOne = 10_000
    max_tenant_bytes: AtLeastOne = 16 * 1024 * 1024 * 1024
    max_connections: AtLeastOne = 10_000
    #: Silence on a stream after which a comment is sent.
    keep_alive_s: Positive = 15.0
    #: On SIGTERM, answers under way may finish for so long; then streams end, to be taken up again.
    grace_s: NotNegative[float] = 30.0
    #: Requests are refused where no coordinator has led for so long; a failover takes seconds.
    without_leader_s: Positive = 10.0
    #: Pause between two looks at the yard's models.
    refresh_s: Positive = 1.0
    #: Where models lie on this machine, if not where hosts have them: "name=path".
    model_paths: tuple[str, ...] = ()
    #: Whether Python code that comes with a model may run here, if the models file trusts it, too.
    trust_remote_code: bool = False
    #: Hosts from which the media are fetched that requests name by URL, such as
    #: "images.example.com" or "10.1.2.3:8080". Of a name, only public addresses; an address is
    #: meant as it stands.
    allowed_media_domains: tuple[str, ...] = ()
    #: Sites whose pages may use the API (CORS), such as "https://app.example.com"; "*": all.
    origins: tuple[str, ...] = ()
    #: Whether it serves the board at /board; the rest as `BoardSettings` has it.
    board: bool = True
    board_content: ContentRule = "nobody"
    board_session_s: AtLeastOne = SESSION_S
    board_max_streams: AtLeastOne = MAX_STREAMS

    @property
    def paths(self) -> dict[str, str]:
        """`model_paths` by name."""
        pairs = (each.partition("=") for each in self.model_paths)
        return {name: path for name, _, path in pairs}

    def _errors(self) -> Iterator[str]:
        if self.files_url and self.files_dir is not None:
            yield "files_dir, files_url: give one of them"
        if self.files_url and not re.fullmatch("s3://[^/]+(/.*)?", self.files_url):
            yield "files_url: must be like s3://bucket/prefix"
        for origin in self.origins:
            if origin == "*" and not self.needs_keys:
                yield "origins: without keys * lets every page of every site use the gateway"
            elif origin != "*" and not _ORIGIN.fullmatch(origin):
                yield f"origins: {origin!r} is not like https://app.example.com"
        for domain in self.allowed_media_domains:
            if not _DOMAIN.fullmatch(domain):
                yield f"allowed_media_domains: {domain!r} is not like images.example.com"
        for each in self.model_paths:
            name, _, path = each.partition("=")
            if not name or not path:
                yield f"model_paths: {each!r} is not name=path"


FrontName = Literal["none", "vllm-rs", "vllm"]
#: The tasks that front ends ask for; a score they make of an answer to another task.
BridgedTask = Literal["auto", "generate", "embed", "classify", "token_embed", "token_classify"]
#: Older front ends end themselves with a request that fails.
_POOL_FROM: Final = (0, 32)
_ENGINE_ADDRESS: Final = re.compile(r"tcp://[^/\s]+:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings(ProgramSettings):
    """What a bridge needs to know. Units stand in the names."""

    name: str = field(default_factory=lambda: default_name("bridge"))
    #: The model that the front end serves, by its name in the yard; empty: its only one.
    model: str = ""
    #: Where front ends that run already wait for their engine.
    handshake: tuple[str, ...] = ()
    #: The front end that the bridge starts itself, with these arguments.
    front: FrontName = "none"
    front_args: tuple[str, ...] = ()
    #: Tokens, prompt and output together; 0: as a host announces.
    max_model_len: NotNegative[int] = 0
    #: What the model does; auto: as a worker that has loaded it says.
    task: BridgedTask = "auto"
    #: Of front ends that run already; the bridge knows that of its own.
    vllm_version: str = "0.32.0"
    #: An X-Request-Id with this prefix names its answer, which is kept for so long.
    id_prefix: str = "idem-"
    result_ttl_s: AtLeastOne = 86_400
    #: Where it keeps what front ends wait for, for the bridge after this one.
    journal_dir: Path | None = None
    #: On SIGTERM, answers under way may finish for so long; what comes is refused.
    grace_s: NotNegative[float] = 30.0
    #: Where a proxy before the front end asks whether a request may pass; 0: nowhere.
    key_check_port: Port = 0
    #: A front end of its own is started again after so long without a bridge.
    gone_s: Positive = 10.0

    def _errors(self) -> Iterator[str]:
        if (self.front == "none") == (not self.handshake):
            yield "front, handshake: give one of them"
        for address in self.handshake:
            if not _ENGINE_ADDRESS.fullmatch(address):
                yield f"handshake: {address!r} is not like tcp://127.0.0.1:29550"
        if self.front_args and self.front == "none":
            yield "front: arguments after -- need it"
        if not self.id_prefix:
            yield "id_prefix: must not be empty, or each id that a front end draws would be kept"
        version = re.match(r"(\d+)\.(\d+)", self.vllm_version)
        if version is None:
            yield f"vllm_version: {self.vllm_version!r} is not like 0.32.0"
        if self.task in {"auto", "generate"}:
            return
        if self.front == "vllm-rs":
            yield "front: vllm-rs has no tasks that pool: give vllm"
        if version is not None and tuple(map(int, version.groups())) < _POOL_FROM:
            yield f"vllm_version: front ends before 0.32 end with the first failure of {self.task}"
