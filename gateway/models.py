"""Which models the yard has, and what each of them needs here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

from gateway.frontend.models import FrontEnds
from gateway.profile import ModelProfile
from gateway.queue.yard import YardQueue
from tokenyard.broker.connection import translated
from tokenyard.protocol.errors import TokenyardError
from tokenyard.protocol.worker_info import ModelInfo, decode_host

#: Defaults for sampling that vLLM's front end applies, and their names in a generation config.
_SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}

log = logging.getLogger("tokenyard.gateway")


class ModelWatch:
    """Follows the hosts of the yard; new models are read in a thread, before anybody asks."""

    def __init__(self, queue: YardQueue, front_ends: FrontEnds, every_s: float) -> None:
        self._queue = queue
        self._front_ends = front_ends
        self._every_s = every_s
        self._profiles: dict[str, ModelProfile] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        """The models and adapters by name."""
        return self._profiles

    async def start(self) -> None:
        """Look once, and go on looking."""
        await self._look()
        self._task = asyncio.create_task(self._run(), name="gateway-models")

    async def stop(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._look()
            except TokenyardError as error:
                log.warning("cannot read the yard's models: %s", error)

    async def _look(self) -> None:
        run: Any = self._queue.connection
        with translated(self._queue.url):
            hosts = await run.hgetall(self._queue.keys.hosts)
        found: dict[str, ModelProfile] = {}
        for packed in hosts.values():
            for model in decode_host(packed).models:
                profile = _profile(model)
                if profile is not None:
                    found.setdefault(model.name, profile)
        self._profiles = found


def _profile(model: ModelInfo) -> ModelProfile | None:
    serving = model.serving
    if serving is None:
        return None
    arguments: dict[str, Any] = dict(serving.serve_args)
    sampling = serving.sampling
    arguments["override_generation_config"] = {
        theirs: sampling[ours] for ours, theirs in _SAMPLING.items() if ours in sampling
    }
    if serving.revision:
        arguments["revision"] = serving.revision
    if serving.max_model_len:
        arguments["max_model_len"] = serving.max_model_len
    return ModelProfile(
        model.name,
        serving.path,
        arguments,
        tuple(name for name in _SAMPLING if name in sampling),
    )
