"""Settings of a bridge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from tokenyard.protocol.http_settings import Port
from tokenyard.protocol.settings import (
    AtLeastOne,
    NotNegative,
    Positive,
    ProgramSettings,
    default_name,
)

FrontName = Literal["none", "vllm-rs", "vllm"]
#: The tasks that front ends ask for; a score they make of an answer to another task.
BridgedTask = Literal["auto", "generate", "embed", "classify", "token_embed", "token_classify"]
#: Older front ends end themselves with a request that fails.
_POOL_FROM: Final = (0, 32)
_ADDRESS: Final = re.compile(r"tcp://[^/\s]+:\d+")


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
            if not _ADDRESS.fullmatch(address):
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
