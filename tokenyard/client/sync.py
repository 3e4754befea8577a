"""The synchronous client: threads and blocking sockets around `tokenyard.client.core`.

One daemon thread, the listener, reads the replies to all of a client's requests over one blocking
connection; it starts at the first request. Many threads may use one client.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Self, TypeVar, Unpack

import redis

from tokenyard import clock
from tokenyard.broker.connection import (
    BLOCK_MARGIN_S,
    ConnectionOptions,
    open_connection,
    translated,
)
from tokenyard.broker.pools import DEFAULT_MAX_CONNECTIONS, DEFAULT_POOL_TIMEOUT_S
from tokenyard.client.build import PreparedRequest
from tokenyard.client.core import BLOCK_MS, ClientCore
from tokenyard.client.handshake import YardInfo
from tokenyard.client.ledger import Cancellation, RequestState
from tokenyard.client.operations import Ask, Delay, Operation, Steps, advance, checked
from tokenyard.client.options import Item, Prompt, RequestOptions, SharedOptions
from tokenyard.client.pending import (
    DeltaCursor,
    PendingRequest,
    SubmittedRequest,
    WaitDeadline,
    succeeded,
)
from tokenyard.client.submission import require_valid
from tokenyard.client.window import MapWindow
from tokenyard.process.running import find_yard
from tokenyard.protocol.errors import ScriptsMissing, SubmissionError, TokenyardError
from tokenyard.protocol.keys import Yard
from tokenyard.protocol.replies import Delta, Result
from tokenyard.scripts import Scripts
from tokenyard.scripts.calls import MISSING_EVERY_S, Call

T = TypeVar("T")

log = logging.getLogger("tokenyard.client")

DEFAULT_CONNECT_TIMEOUT_S: Final = 10.0
DEFAULT_RESULT_TIMEOUT_S: Final = 600.0
# The margin is that of a busy client's reads. An idle client has less, and loses nothing by
# reconnecting to a server that hangs; a longer time-out would detect lost connections later.
LISTEN_TIMEOUT_S: Final = BLOCK_MS / 1000 + BLOCK_MARGIN_S


class ClientBase:
    """The arguments of both clients, which differ in how they carry operations out."""

    def __init__(
        self,
        url: str | None = None,
        yard: str | None = None,
        client_id: str | None = None,
        tokenizer: object | None = None,
        *,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        result_timeout_s: float = DEFAULT_RESULT_TIMEOUT_S,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        pool_timeout_s: float = DEFAULT_POOL_TIMEOUT_S,
    ) -> None:
        url, yard = find_yard(url, yard)
        self._core = ClientCore(
            url, yard, client_id, tokenizer, connect_timeout_s, result_timeout_s
        )
        self._has_started = False
        self._open(url, {"max_connections": max_connections, "pool_timeout_s": pool_timeout_s})

    def _open(self, url: str, options: ConnectionOptions) -> None:
        """Make the connections, which connect when first used."""
        raise NotImplementedError

    @property
    def client_id(self) -> str:
        """The name of this client's reply stream."""
        return self._core.state.client_id

    def wait_deadline(self, timeout_s: float | None = None) -> WaitDeadline:
        """A deadline for one wait, by default the client's own. For handles."""
        return WaitDeadline(timeout_s, self._core.state.result_timeout_s)


class Client(ClientBase):
    """Submits requests to one yard and reads the replies.

    Use it as a context manager, or call `start` and `close`; otherwise it starts when first used.
    ``url`` is redis://, rediss:// or unix://, ``yard`` the name of a yard (`main`). Without a URL
    the variables ``TOKENYARD_REDIS_URL`` and ``TOKENYARD_YARD`` apply, then the yard that
    `tokenyard up` runs on this machine; where there is neither, `BrokerUnavailable` explains what
    to do. ``tokenizer`` is a folder, a Hugging Face name or a tokenizer object: with it, the client
    tokenizes and detokenizes; without it, workers do. Chats are always left to the workers.

    ``client_id`` names the stream of this client's replies; by default it is random. A program that
    sets it can restart under the same name and `attach` to its requests; only one live process may
    use a name at a time.

    Time-outs are in seconds: ``connect_timeout_s`` to find a coordinator, ``result_timeout_s`` for
    each wait that has no time-out of its own.

    ``max_connections`` limits the connections to the broker, beside the listener's. While all of
    them are in use, a call waits; after ``pool_timeout_s`` it raises `BrokerUnavailable`.
    """

    def _open(self, url: str, options: ConnectionOptions) -> None:
        self._connection = open_connection(url, **options)
        self._scripts = Scripts(Yard(self._connection, self._core.state.keys))
        self._turn = threading.Lock()  # held while the core runs, not during its operations
        self._starting = threading.Lock()
        self._closing = threading.Event()
        self._listener: threading.Thread | None = None

    def start(self) -> None:
        """Connect and make the handshake; idempotent.

        Raises `BrokerUnavailable` (`BrokerNotWritable` where no coordinator can lead),
        `BrokerUnsuitable`, `NoCoordinator` or `ProtocolMismatch`.
        """
        if not self._has_started:
            self.info()

    def close(self) -> None:
        """Stop listening and cancel requests with ``cancel_on_disconnect``; all others continue.

        Idempotent. The listener ends with its blocking read, within `IDLE_BLOCK_MS`.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        with self._turn:
            self._core.close()
        with contextlib.suppress(TokenyardError):
            self._drive(self._core.leave())
        self._connection.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def info(self) -> YardInfo:
        """The yard's protocol version, models, limits and workers."""
        info = self._drive(self._core.handshake())
        self._has_started = True
        return info

    def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Handle:
        """Submit one request: text, token ids or chat messages; see `RequestOptions`.

        Raises `InvalidRequest`, `QueueFull`, `QuotaExceeded` where a limit of its ``tenant``
        refuses it, `DeadlineUnmeetable` (only with ``refuse_late``), `IdReused` where the ``id`` is
        known with another prompt, model or parameters (`attach` reads its answer), or
        `BrokerUnavailable`. After the last, the request may have been accepted: submit it again
        with the same ``id``, and it runs once.
        """
        self._listen()
        prepared = self._core.builder.prepare(prompt, options)
        [handle] = self._submit([prepared])
        return handle

    def submit_many(self, items: Sequence[Item], **shared: Unpack[SharedOptions]) -> list[Handle]:
        """Submit many requests in as few calls as possible; an item may be a mapping with options.

        Raises like `submit`. If one item is invalid, nothing is sent; ``accepted`` of `QueueFull`,
        `QuotaExceeded`, `DeadlineUnmeetable` and `IdReused` has the handles of those accepted.
        """
        self._listen()
        return self._submit(require_valid(self._core.builder.prepare_many(items, shared)))

    def _submit(self, prepared: Sequence[PreparedRequest]) -> list[Handle]:
        try:
            requests = self._drive(self._core.submitter.submit(prepared))
        except SubmissionError as error:
            error.accepted = [Handle(self, pending) for pending in error.accepted]
            raise
        return [Handle(self, pending) for pending in requests]

    def map(
        self,
        items: Iterable[Item],
        *,
        window: int = 1000,
        ordered: bool = False,
        patience_s: float = math.inf,
        **shared: Unpack[SharedOptions],
    ) -> Iterator[tuple[int, Result]]:
        """Run any number of requests, at most ``window`` at a time.

        Yields the index of each item and its result, whatever its status, as results come or in
        the order of the items. Waits while the queue is full or its tenant has reached a limit, and
        while the broker is unavailable or not writable. Without progress for ``result_timeout_s``,
        raises `BrokerUnavailable` if that is the cause, else `WaitTimeout`. Raises `QuotaExceeded`
        where nothing runs and a limit refuses the next requests for more than ``patience_s``.
        """
        self._listen()
        updated = threading.Event()
        # Most results come while the event is set already, and setting it takes a lock.
        state = MapWindow(
            items,
            window,
            ordered=ordered,
            wake=lambda: None if updated.is_set() else updated.set(),
            timeout_s=self._core.state.result_timeout_s,
            patience_s=patience_s,
        )
        try:
            while not state.is_over:
                updated.clear()
                state.add(self._core.builder.prepare_map(state.pull(), shared))
                self._drive(self._core.submitter.submit_window(state))
                yield from state.ready()
                if state.is_stuck:
                    raise self._drive(self._core.submitter.timeout_error(state))
                updated.wait(state.wait_s())
        finally:
            with self._turn:
                self._core.forget(state.running)

    def attach(self, request_id: str) -> Handle:
        """A handle for a request that this client, or an earlier one of its name, has submitted.

        Of what that one has read and deleted, the text is made again with this client's tokenizer,
        or the yard's where it is on this host; elsewhere it comes with the result.

        Raises `UnknownRequest`.
        """
        self._listen()
        return Handle(self, self._drive(self._core.attach(request_id)))

    def status(self, request_id: str) -> RequestState:
        """The state of a request of this client; raises `UnknownRequest`."""
        return self._drive(self._core.status(request_id))

    def cancel(self, request_id: str) -> Cancellation:
        """Cancel a request of this client, wherever it is; returns the outcome immediately.

        Its result is then `cancelled`, with the tokens that were published. Works without a
        coordinator.
        """
        return self._drive(self._core.cancel(request_id))

    # Carrying out the core's operations

    def _drive(self, steps: Steps[T], connection: redis.Redis | None = None) -> T:
        """Carry out operations until the steps end."""
        answer: Any = None
        while True:
            try:
                with self._turn:
                    step = advance(steps, answer)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                answer = self._do(step, connection or self._connection)
            except TokenyardError as error:
                answer = error

    def _do(self, operation: Operation, connection: redis.Redis) -> Any:
        with translated(self._core.state.url):
            match operation:
                case Delay():
                    return clock.wait(self._closing, operation.seconds)
                case Ask():
                    return _ask(connection, operation)
                case _:
                    return self._call(operation)

    def _call(self, call: Call[Any]) -> Any:
        """Call a script; waits for one that only the leader may load."""
        give_up = clock.monotonic() + self._core.script_timeout_s(call)
        while True:
            try:
                return self._scripts.call(call)
            except ScriptsMissing:
                if clock.monotonic() >= give_up or clock.wait(self._closing, MISSING_EVERY_S):
                    raise

    def _listen(self) -> None:
        """Start this client and its listener, once."""
        if self._core.state.is_closed:
            raise RuntimeError("the client is closed")
        if self._listener is not None:
            return
        with self._starting:
            self.start()
            if self._listener is None:
                name = f"tokenyard-replies-{self.client_id}"
                self._listener = threading.Thread(target=self._run_listener, name=name, daemon=True)
                self._listener.start()

    def _run_listener(self) -> None:
        """The body of the listener."""
        failure = TokenyardError("the client has ended")
        try:
            with open_connection(
                self._core.state.url, timeout_s=LISTEN_TIMEOUT_S, retries=0
            ) as connection:
                self._drive(self._core.listen(), connection)
        except TokenyardError as error:
            failure = error
        except Exception as error:
            log.exception("the client's listener failed")
            failure = TokenyardError(f"the client has failed: {error!r}")
        finally:
            with self._turn:
                self._listener = None  # the next request starts a new one
                self._core.state.router.forget_all(failure)


def _ask(connection: redis.Redis, ask: Ask) -> list[Any]:
    run: Any = connection  # redis-py gives no types for commands by name
    if len(ask.commands) == 1:
        return [run.execute_command(*ask.commands[0])]
    with run.pipeline(transaction=False) as pipeline:
        for command in ask.commands:
            pipeline.execute_command(*command)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
    return checked(answers, ask)


class Handle(SubmittedRequest):
    """One submitted request."""

    def __init__(self, client: Client, pending: PendingRequest) -> None:
        super().__init__(pending)
        self._client = client

    def cancel(self) -> Cancellation:
        """Cancel the request; see `Client.cancel`. `result` then raises with code CANCELLED."""
        return self._client.cancel(self.id)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, at most ``timeout`` seconds (by default the client's time-out).

        Raises `RequestFailed` for one that is not `completed`, `WaitTimeout`, `UnknownRequest`.
        ``math.inf`` waits forever.
        """
        return succeeded(self.wait(timeout))

    def wait(self, timeout: float | None = None) -> Result:
        """Like `result`, but also returns the result of a request that did not complete."""
        self._wait(lambda: self._pending.is_over, timeout)
        return self._pending.result()

    def __iter__(self) -> Iterator[Delta]:
        """The deltas from the first on, as they come; together they are the whole reply.

        Raises like `result`, after the last one. The time-out applies to each delta.
        """
        cursor = DeltaCursor(self._pending)
        while not cursor.is_over:
            self._wait(lambda: cursor.has_updates, None)
            yield from cursor.read()

    def status(self) -> RequestState:
        """The state of the request, read from its ledger; raises `UnknownRequest`."""
        return self._client.status(self.id)

    def _wait(self, is_enough: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until ``is_enough``, which depends on the replies; raises `WaitTimeout`."""
        # Faster than `threading.Event`, which is made of locks in Python.
        updated: queue.SimpleQueue[PendingRequest] = queue.SimpleQueue()
        listener = updated.put
        self._pending.listeners.append(listener)
        deadline = self._client.wait_deadline(timeout_s)
        try:
            while not is_enough():
                with contextlib.suppress(queue.Empty):
                    updated.get(timeout=deadline.left_s(self._pending))
        finally:
            self._pending.listeners.remove(listener)
