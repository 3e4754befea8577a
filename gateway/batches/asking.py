"""vLLM's front end in a batch worker: its loop has a thread of its own, as the job has."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from gateway.announcements import OwnRules
from gateway.batches.lines import LineAsker, Unanswered
from gateway.frontend.fetching import FileReader, MediaFetcher
from gateway.frontend.models import FrontEnds
from gateway.models import ModelWatch
from gateway.queue.yard import YardQueue
from tokenyard.batch.asking import (
    Answer,
    AskingFactory,
    Ending,
    WaitsForLimit,
    waiting_lines,
    window_for,
)
from tokenyard.batch.files import NumberedLine, read_lines
from tokenyard.batch.opening import OpenJob, id_of

T = TypeVar("T")

_REFRESH_S: Final = 1.0
_STOP_S: Final = 10.0


class FrontEndAsking:
    """Asks the lines of one job by vLLM's front end; see `tokenyard.batch.asking.Asking`."""

    def __init__(
        self,
        url: str,
        yard: str,
        rules: OwnRules,
        read_file: FileReader,
        job: OpenJob,
        ending: Ending,
    ) -> None:
        self._job = job
        self._ending = ending
        # Named as the job, so that the broker's user for batches may write to it.
        self._queue = YardQueue(url, yard, job.state.id)
        fetcher = MediaFetcher(rules.allowed_media_domains, read_file)
        self._front_ends = FrontEnds(self._queue, fetcher=fetcher)
        self._models = ModelWatch(self._queue, self._front_ends, _REFRESH_S, rules, is_eager=False)
        self._asker = LineAsker(job, ending, self._front_ends, self._models)
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._asking: Future[None] | None = None
        self._limit: WaitsForLimit | None = None
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Connect, and look for models."""
        await self._queue.start()
        await self._models.start()

    async def stop(self) -> None:
        """Disconnect; what is under way goes on for the next worker, unless the job has ended."""
        self._queue.is_leaving = not self._ending.code
        self._asker.is_over.set()
        if self._asking is not None:
            await asyncio.wait([asyncio.wrap_future(self._asking)], timeout=_STOP_S)
        await self._models.stop()
        await self._queue.stop()

    def answers(self, check: Callable[[], None]) -> Iterator[Answer]:
        """See `Asking`."""
        self._asking = asyncio.run_coroutine_threadsafe(self._ask_all(), self._loop)
        self._asking.add_done_callback(lambda _: self._answers.put(None))
        while (answer := self._answers.get()) is not None:
            yield answer
        check()
        self._asking.result()
        if self._limit is not None and not self._ending.code:
            raise self._limit

    async def _ask_all(self) -> None:
        window = self._job.state.spec.window or window_for(await self._models.workers())
        room = asyncio.Semaphore(window)
        async with asyncio.TaskGroup() as group:
            lines = read_lines(self._job.state.spec.input_path)
            for numbered in waiting_lines(self._job, self._ending, lines):
                await room.acquire()
                if self._asker.is_over.is_set():
                    break
                task = group.create_task(self._ask(numbered))
                task.add_done_callback(lambda _: room.release())

    async def _ask(self, numbered: NumberedLine) -> None:
        number, raw = numbered
        try:
            line = await self._asker.answer(number, raw)
        except WaitsForLimit as limit:
            # What the queue has accepted meanwhile goes on, and is answered the next time.
            self._limit, self._queue.is_leaving = limit, True
            self._asker.is_over.set()
            return
        except Unanswered:
            if self._queue.is_leaving:
                return
            line = self._ending.line(number, None if raw is None else id_of(raw))
        self._answers.put((number, line))

    def interrupt(self) -> None:
        """See `Asking`."""
        self._answers.put(None)

    def cancel(self) -> None:
        """See `Asking`."""
        self._loop.call_soon_threadsafe(self._asker.is_over.set)


def by_front_end(url: str, yard: str, rules: OwnRules, read_file: FileReader) -> AskingFactory:
    """Asks by vLLM's front end, under the job's id as the client's name."""

    @contextlib.contextmanager
    def begin(job: OpenJob, ending: Ending) -> Iterator[FrontEndAsking]:
        async def make() -> FrontEndAsking:
            made = FrontEndAsking(url, yard, rules, read_file, job, ending)
            await made.start()
            return made

        with _running_loop() as run:
            asking = run(make())
            try:
                yield asking
            finally:
                run(asking.stop())

    return begin


@contextlib.contextmanager
def _running_loop() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """A loop in a thread, and a function that runs a coroutine there to its end."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="front-end", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    try:
        yield run
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
