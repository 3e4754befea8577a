"""The synchronous client: threads and blocking sockets around `tokenyard.client.core`.

One daemon thread hears the replies to all of a client's requests over one blocking connection;
it starts at the first request. A client may be used by many threads.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Self, TypeVar, Unpack

import redis

from tokenyard.broker.connection import BLOCK_MARGIN_S, open_connection, translated
from tokenyard.broker.pools import DEFAULT_MAX_CONNECTIONS, DEFAULT_POOL_TIMEOUT_S
from tokenyard.client.build import Item, PreparedRequest, Prompt, RequestOptions, SharedOptions
from tokenyard.client.core import BLOCK_MS, ClientCore, sound
from tokenyard.client.handshake import YardInfo
from tokenyard.client.ledger import Cancellation, RequestState
from tokenyard.client.operations import Ask, Operation, Pause, Steps, checked
from tokenyard.client.pending import DeltaCursor, Patience, PendingRequest
from tokenyard.client.window import MapWindow
from tokenyard.process.running import find_yard
from tokenyard.protocol.errors import (
    DeadlineUnmeetable,
    IdReused,
    QueueFull,
    ScriptsMissing,
    TokenyardError,
)
from tokenyard.protocol.replies import Delta, Result
from tokenyard.scripts import MISSING_EVERY_S, Call, Scripts

T = TypeVar("T")

DEFAULT_CONNECT_TIMEOUT_S: Final = 10.0
DEFAULT_RESULT_TIMEOUT_S: Final = 600.0
# The margin is for a busy client's reads. One that idles has less, and loses nothing where a server
# that stands still has it connect anew; a longer time-out would find lost connections later.
LISTEN_TIMEOUT_S: Final = BLOCK_MS / 1000 + BLOCK_MARGIN_S


class Client:
    """Submits requests to one yard and hears the replies.

    Use it as a context manager, or call `start` and `close`; without, it starts when first
    used. ``url`` is redis://, rediss:// or unix://, ``yard`` the name of a yard (`main`). Without a
    URL the variables ``TOKENYARD_REDIS_URL`` and ``TOKENYARD_YARD`` count, then the yard that
    `tokenyard up` runs on this machine; where there is neither, `BrokerUnavailable` says what to
    do. ``tokenizer`` is a folder, a Hugging Face name or a tokenizer object: with it, text becomes
    tokens here and tokens become text here; without it, workers do both. Of chats, workers make
    tokens and text in any case.

    ``client_id`` names the stream of this client's replies. It is random where left out. A
    program that gives one can come back after a crash under the same name and `attach` to its
    requests; only one live process may use a name at a time.

    Time-outs are in seconds: ``connect_timeout_s`` for a coordinator to show up,
    ``result_timeout_s`` for any wait that is given none of its own.

    ``max_connections`` bounds its connections to the broker, beside the one that hears replies.
    With all of them in use, a call waits; after ``pool_timeout_s`` it raises `BrokerUnavailable`.
    """

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
        self._connection = open_connection(
            url, max_connections=max_connections, pool_timeout_s=pool_timeout_s
        )
        self._scripts = Scripts(self._connection, self._core.keys)
        self._turn = threading.Lock()  # held while the dialogue runs, not during its operations
        self._starting = threading.Lock()
        self._closing = threading.Event()
        self._listener: threading.Thread | None = None
        self._has_met = False

    @property
    def client_id(self) -> str:
        """The name under which replies come."""
        return self._core.client_id

    def start(self) -> None:
        """Connect and shake hands; does nothing where that is done.

        Raises `BrokerUnavailable` (`BrokerNotWritable` where nobody can lead), `BrokerUnsuitable`,
        `NoCoordinator` or `ProtocolMismatch`.
        """
        if not self._has_met:
            self.info()

    def close(self) -> None:
        """Stop hearing; requests under way go on, but for those with ``cancel_on_disconnect``.

        Idempotent.
        The listener ends when its blocking read does, within `IDLE_BLOCK_MS`.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        with self._turn:
            self._core.close()
        with contextlib.suppress(TokenyardError):
            self._drive(self._core.take_leave())
        self._connection.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def info(self) -> YardInfo:
        """What the yard says of itself: protocol, models, limits, workers."""
        info = self._drive(self._core.meet())
        self._has_met = True
        return info

    def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Handle:
        """Submit one request: text, token ids or chat messages; see `RequestOptions`.

        Raises `InvalidRequest`, `QueueFull`, `DeadlineUnmeetable` (only with ``refuse_late``),
        `IdReused` where the ``id`` is known with another prompt, model or parameters (`attach`
        reads the answer to that), or `BrokerUnavailable`. After the last, the request may have
        been accepted: submit it again with the same ``id``, and it runs once.
        """
        self._listen()
        draft = self._core.draft(prompt, options)
        [handle] = self._submit([draft])
        return handle

    def submit_many(self, items: Sequence[Item], **shared: Unpack[SharedOptions]) -> list[Handle]:
        """Submit a burst in as few calls as possible; an item may be a mapping with options.

        Raises like `submit`; nothing is sent where one is invalid, and ``accepted`` of
        `QueueFull`, `DeadlineUnmeetable` and `IdReused` has the handles of those that were
        accepted.
        """
        self._listen()
        return self._submit(sound(self._core.draft_many(items, shared)))

    def _submit(self, drafts: Sequence[PreparedRequest]) -> list[Handle]:
        try:
            exchanges = self._drive(self._core.submit(drafts))
        except (QueueFull, DeadlineUnmeetable, IdReused) as refused:
            refused.accepted = [Handle(self, exchange) for exchange in refused.accepted]
            raise
        return [Handle(self, exchange) for exchange in exchanges]

    def map(
        self,
        items: Iterable[Item],
        *,
        window: int = 1000,
        ordered: bool = False,
        **shared: Unpack[SharedOptions],
    ) -> Iterator[tuple[int, Result]]:
        """Run any number of requests, at most ``window`` at a time.

        Yields the number of each item and its result, whatever it is, as results come or in the
        order of the items. A full queue is waited for, and so is a broker that is away or takes
        no writes. Where nothing moves for ``result_timeout_s``, raises `BrokerUnavailable` if that
        is the cause, else `WaitTimeout`.
        """
        news = threading.Event()
        # Most results come while there is news already, and setting it takes a lock.
        state = MapWindow(
            items, window, ordered=ordered, wake=lambda: None if news.is_set() else news.set()
        )
        self._listen()
        patience_s = self._core.result_timeout_s
        give_up = time.monotonic() + patience_s
        try:
            while not state.is_over:
                news.clear()
                state.add(self._core.draft_many(state.pull(), shared))
                if self._drive(self._core.submit_window(state)):
                    give_up = time.monotonic() + patience_s
                has_moved = False
                for numbered in state.ready():
                    yield numbered
                    has_moved = True
                now = time.monotonic()
                if has_moved:
                    give_up = now + patience_s
                elif now >= give_up:
                    raise self._drive(self._core.give_up(state))
                news.wait(state.wait_s(now, give_up - now))
        finally:
            with self._turn:
                self._core.forget(state.running)

    def attach(self, request_id: str) -> Handle:
        """A handle for a request that this client, or one of the same name, submitted earlier.

        Raises `UnknownRequest`.
        """
        self._listen()
        return Handle(self, self._drive(self._core.attach(request_id)))

    def status(self, request_id: str) -> RequestState:
        """Where a request of this client stands; raises `UnknownRequest`."""
        return self._drive(self._core.status(request_id))

    def cancel(self, request_id: str) -> Cancellation:
        """Cancel a request of this client, wherever it is; says what became of it, at once.

        Its result is then `cancelled`, with the tokens that were published. Needs no coordinator.
        """
        return self._drive(self._core.cancel(request_id))

    def wait_for(
        self, exchange: PendingRequest, is_enough: Callable[[], bool], timeout_s: float | None
    ) -> None:
        """Wait until an exchange has brought enough; raises `WaitTimeout`. For handles."""
        # Quicker than an event, which is made of locks in Python, and here somebody waits for it.
        news: queue.SimpleQueue[None] = queue.SimpleQueue()

        def listener(_: PendingRequest) -> None:
            news.put(None)

        exchange.listeners.append(listener)
        patience = Patience(timeout_s, self._core.result_timeout_s)
        try:
            while not is_enough():
                with contextlib.suppress(queue.Empty):
                    news.get(timeout=patience.left_s(exchange))
        finally:
            exchange.listeners.remove(listener)

    # Carrying out the dialogue

    def _drive(self, steps: Steps[T], connection: redis.Redis | None = None) -> T:
        """Carry out operations until the steps end."""
        answer: Any = None
        fault: TokenyardError | None = None
        while True:
            try:
                with self._turn:
                    step = steps.send(answer) if fault is None else steps.throw(fault)
            except StopIteration as end:
                result: T = end.value
                return result
            answer, fault = None, None
            try:
                answer = self._do(step, connection or self._connection)
            except TokenyardError as error:
                fault = error

    def _do(self, operation: Operation, connection: redis.Redis) -> Any:
        with translated(self._core.url):
            match operation:
                case Pause():
                    return self._closing.wait(operation.seconds)
                case Ask():
                    return _ask(connection, operation)
                case _:
                    return self._call(operation)

    def _call(self, call: Call[Any]) -> Any:
        """Call a script; one that the leader is to load is waited for."""
        give_up = time.monotonic() + self._core.patience_s(call)
        while True:
            try:
                return self._scripts.call(call)
            except ScriptsMissing:
                if time.monotonic() >= give_up or self._closing.wait(MISSING_EVERY_S):
                    raise

    def _listen(self) -> None:
        """Meet the yard and start to hear replies, once."""
        if self._core.is_closed:
            raise RuntimeError("the client is closed")
        if self._listener is not None:
            return
        with self._starting:
            self.start()
            if self._listener is None:
                name = f"tokenyard-replies-{self.client_id}"
                self._listener = threading.Thread(target=self._hear, name=name, daemon=True)
                self._listener.start()

    def _hear(self) -> None:
        """The listener's life."""
        fault = TokenyardError("the client has failed, see its log")
        try:
            with open_connection(
                self._core.url, timeout_s=LISTEN_TIMEOUT_S, retries=0
            ) as connection:
                self._drive(self._core.listen(), connection)
        except TokenyardError as error:
            fault = error
        finally:
            with self._turn:
                self._listener = None  # the next request starts another
                self._core.break_off(fault)


def _ask(connection: redis.Redis, ask: Ask) -> list[Any]:
    run: Any = connection  # redis-py gives no types for commands by name
    if len(ask.commands) == 1 and ask.wait is None:
        return [run.execute_command(*ask.commands[0])]
    with run.pipeline(transaction=False) as pipeline:
        for command in ask.commands:
            pipeline.execute_command(*command)
        if ask.wait is not None:
            pipeline.execute_command(*ask.wait)
        answers: list[Any] = pipeline.execute(raise_on_error=False)
    return checked(answers, ask)


class Handle:
    """One request that is under way or over."""

    def __init__(self, client: Client, exchange: PendingRequest) -> None:
        self._client = client
        self._exchange = exchange

    def __repr__(self) -> str:
        return f"<Handle {self.id!r}>"

    @property
    def id(self) -> str:
        """The id of the request."""
        return self._exchange.id

    @property
    def position(self) -> int | None:
        """How many requests were to be served before it, when it was submitted.

        None where that is not known: for a request that the yard had already.
        """
        return self._exchange.position

    @property
    def eta_s(self) -> float | None:
        """How long those before it were likely to take; None while the yard knows no rate."""
        return self._exchange.eta_s

    def cancel(self) -> Cancellation:
        """Cancel the request; see `Client.cancel`. `result` then raises with code CANCELLED."""
        return self._client.cancel(self.id)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, at most ``timeout`` seconds (the client's own where None).

        Raises `RequestFailed` for one that is not `completed`, `WaitTimeout`, `UnknownRequest`.
        ``math.inf`` waits for ever.
        """
        self._wait(lambda: self._exchange.is_over, timeout)
        return self._exchange.success()

    def wait(self, timeout: float | None = None) -> Result:
        """Like `result`, but gives any result back, also of a request that failed."""
        self._wait(lambda: self._exchange.is_over, timeout)
        return self._exchange.result()

    def __iter__(self) -> Iterator[Delta]:
        """The deltas from the first on, as they come; together they are the whole reply.

        Raises like `result`, after the last; `WaitTimeout` counts from delta to delta.
        """
        cursor = DeltaCursor(self._exchange)
        while not cursor.is_over:
            self._wait(lambda: cursor.has_news, None)
            yield from cursor.read()

    def status(self) -> RequestState:
        """Where the request stands, read from its ledger; raises `UnknownRequest`."""
        return self._client.status(self.id)

    def _wait(self, is_enough: Callable[[], bool], timeout_s: float | None) -> None:
        self._client.wait_for(self._exchange, is_enough, timeout_s)
