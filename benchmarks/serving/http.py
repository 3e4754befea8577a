"""vLLM's server with a concurrent HTTP client: completions, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import aiohttp
import uvloop

from benchmarks.cold_start.serve import HOST, Front, Server, served
from benchmarks.serving.case import TIMEOUT_S, Load, Outcome, Task, Workload
from benchmarks.serving.load import Pieces, put_load

CONNECTIONS: Final = 256
_EVENT: Final = b"data: "
_END: Final = b"[DONE]"


class Http:
    """A client with `CONNECTIONS` connections."""

    def __init__(self, server: Server, workload: Workload) -> None:
        self._server = server
        self._workload = workload

    @property
    def pid(self) -> int:
        """The process id of the server's first process."""
        return self._server.pid

    def wait_until_ready(self) -> None:
        """Wait until its model is loaded."""
        self._server.wait_until_healthy()

    def run(self, load: Load) -> Outcome:
        """Put a load on the server."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._run(load))

    async def _run(self, load: Load) -> Outcome:
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        patience = aiohttp.ClientTimeout(TIMEOUT_S)
        base = f"http://{HOST}:{self._server.port}"
        async with aiohttp.ClientSession(base, connector=connector, timeout=patience) as session:
            return await put_load(_Asker(session, self._workload, streams=load.streams), load)


class _Asker:
    """See `Source`; a request waits while all connections are busy."""

    def __init__(
        self, session: aiohttp.ClientSession, workload: Workload, *, streams: bool
    ) -> None:
        self._session = session
        self._workload = workload
        self._streams = streams

    async def ask(self, tasks: Sequence[Task]) -> Sequence[Pieces]:
        """See `Source`."""
        return [self._answer(task) for task in tasks]

    async def _answer(self, task: Task) -> Pieces:
        question = {
            **self._workload.sampling(),
            "model": self._workload.model.name,
            "prompt": task.prompt,
            "stream": self._streams,
            "return_token_ids": not task.is_text,
        }
        async with self._session.post("/v1/completions", json=question) as response:
            if not response.ok:
                raise ConnectionError(f"{response.status}: {await response.text()}")
            if not self._streams:
                yield _piece(task, await response.json())
                return
            async for line in response.content:
                words = line.removeprefix(_EVENT).strip()
                if words and words != _END:
                    yield _piece(task, json.loads(words))


def _piece(task: Task, said: Any) -> str | list[int]:
    choice = said["choices"][0]
    return str(choice["text"]) if task.is_text else list(choice["token_ids"] or ())


@contextmanager
def http_server(workload: Workload, front: Front) -> Iterator[Http]:
    """Start vLLM's server; it is up after `wait_until_ready`."""
    with served(workload.model, front) as server:
        yield Http(server, workload)
