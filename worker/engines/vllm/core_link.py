"""The socket between a front and its core: requests one way, outputs the other, and calls.

Each side sees the death of the other as the end of the connection. A core outlives its fronts: it
listens at a Unix socket, drops the requests of a front that is gone, and serves the next one.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import pickle
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Listener
from typing import Any, Final

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tokenyard import clock
from worker.engines import DeviceLost, DeviceUnusable, Unsupported
from worker.engines.connecting import connect
from worker.engines.vllm.core import Core

log = logging.getLogger("tokenyard.worker.core")

#: Larger arrays of outputs are parts of their own, which saves a copy and costs a call.
_INLINE_BYTES: Final = 64 * 1024
_RETRY_S: Final = 0.02
_FAULT_S: Final = 2.0
#: Errors of a core that a front tells apart; of others only the name and the text pass.
_ERRORS: Final = {one.__name__: one for one in (Unsupported, DeviceLost, DeviceUnusable)}


class Kind(enum.IntEnum):
    """What a frame is."""

    ADD = 0  # a request of vLLM
    ABORT = 1  # ids of requests
    CALL = 2  # number, name, arguments
    OUTPUTS = 3  # of a step of vLLM
    ANSWER = 4  # number, value, name and text of an error
    REFUSED = 5  # lane entries with reasons
    FAULT = 6  # name and text of the error that ends the core


Error = tuple[str, str]


def error_of(error: BaseException) -> Error:
    """The name and text of an error."""
    return type(error).__name__, str(error)


def raised(error: Error) -> Exception:
    """An error with that name and text."""
    name, text = error
    kind: type[Exception] = _ERRORS.get(name) or type(name, (Exception,), {})
    return kind(text)


class Frames:
    """A connection that carries frames of several parts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: Kind, parts: Sequence[Any]) -> None:
        """Send a frame, or drop it if the other side is gone (see `receive`); any thread may."""
        with self._lock, contextlib.suppress(ConnectionError):
            if len(parts) == 1:
                self._connection.send_bytes(b"".join((bytes((kind, 1)), parts[0])))
                return
            # A step may have an array for each of hundreds of requests.
            self._connection.send_bytes(bytes((kind, 0)) + len(parts).to_bytes(4, "little"))
            for part in parts:
                self._connection.send_bytes(part)

    def send_object(self, kind: Kind, value: Any) -> None:
        """Send any value."""
        self.send(kind, [pickle.dumps(value, pickle.HIGHEST_PROTOCOL)])

    def receive(self) -> tuple[Kind, list[Any]]:
        """The next frame; raises `EOFError` or `OSError` where the other side is gone."""
        first = self._connection.recv_bytes()
        if first[1]:
            return Kind(first[0]), [memoryview(first)[2:]]
        count = int.from_bytes(first[2:], "little")
        return Kind(first[0]), [self._connection.recv_bytes() for _ in range(count)]

    def close(self) -> None:
        """Close it."""
        self._connection.close()


# The front's side


class SocketLink(EngineCoreClient):
    """How a front reaches its core, also as vLLM's client of it."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Connect to the core at ``address``, which may still be starting."""
        self._frames = Frames(connect(address, timeout_s))
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
        self._refused: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        self._fault: Error | None = None
        self._wake: Callable[[], None] = lambda: None
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        threading.Thread(target=self._receive, name="core", daemon=True).start()

    def listen(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from another thread, when there are outputs."""
        self._wake = wake

    @property
    def has_outputs(self) -> bool:
        """Whether there are outputs or refused requests to take, or an error to raise."""
        return not (self._outputs.empty() and self._refused.empty()) or self._fault is not None

    def refused(self) -> Mapping[str, str]:
        """Requests whose grammars cannot be compiled, by lane entry, with the reasons."""
        refused: dict[str, str] = {}
        while not self._refused.empty():
            refused |= self._refused.get()
        return refused

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `Core`; raises what that raises. Any thread may call."""
        number, answer = next(self._numbers), Future[Any]()
        self._calls[number] = answer
        self._frames.send_object(Kind.CALL, (number, method, arguments))
        return answer.result()

    # Of vLLM's `EngineCoreClient`

    def get_supported_tasks(self) -> Any:
        """What the model does."""
        return self.call("supported_tasks")

    def reset_mm_cache(self) -> None:
        """Forget the media of earlier requests."""
        self.call("reset_mm_cache")

    def dp_engines_running(self) -> bool:
        """Never: there is one engine."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """The core is closed by its owner."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request."""
        self._frames.send(Kind.ADD, self._encoder.encode(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests; unknown ones are ignored."""
        if request_ids:
            self._frames.send_object(Kind.ABORT, list(request_ids))

    def get_output(self) -> EngineCoreOutputs:
        """The outputs of one step; none where no step has ended. Raises the core's last error."""
        try:
            return self._outputs.get_nowait()
        except queue.Empty:
            if self._fault is not None:
                raise raised(self._fault) from None
            return EngineCoreOutputs()

    def _receive(self) -> None:
        while True:
            try:
                kind, parts = self._frames.receive()
            except (EOFError, OSError):
                # The controller sees why the core is gone; what was not published is made again.
                if self._fault is not None:
                    clock.sleep(_FAULT_S)  # the main thread ends the process with this error
                os._exit(1)
            match kind:
                case Kind.OUTPUTS:
                    self._outputs.put(self._decoder.decode(parts))
                    self._wake()
                case Kind.ANSWER:
                    number, value, error = pickle.loads(parts[0])  # noqa: S301 - our own process
                    answer = self._calls.pop(number)
                    if error is None:
                        answer.set_result(value)
                    else:
                        answer.set_exception(raised(error))
                case Kind.REFUSED:
                    self._refused.put(pickle.loads(parts[0]))  # noqa: S301
                    self._wake()
                case Kind.FAULT:
                    self._fault = pickle.loads(parts[0])  # noqa: S301
                    self._wake()


# The core's side


class CoreServer:
    """Serves one front after another, in its own threads, and hands their messages over."""

    def __init__(self, address: str, at_once: Mapping[str, Callable[[], Any]]) -> None:
        """``at_once`` are calls that a thread may answer beside a step."""
        #: What fronts send, and from which; without a kind: that front is gone.
        self.inbox: queue.SimpleQueue[tuple[Kind | None, Any, Frames]] = queue.SimpleQueue()
        self.core: Core | None = None
        self._listener = Listener(address, "AF_UNIX")
        self._at_once = at_once
        self._outbox: queue.SimpleQueue[tuple[Kind, Any, Frames]] = queue.SimpleQueue()
        self._frames: Frames | None = None
        threading.Thread(target=self._serve, name="front", daemon=True).start()
        threading.Thread(target=self._send, name="outputs", daemon=True).start()

    def put(self, kind: Kind, value: Any, front: Frames | None = None) -> None:
        """Send to a front, or to the one that is there; never waits."""
        front = front or self._frames
        if front is not None:
            self._outbox.put((kind, value, front))

    def flush(self, timeout_s: float) -> None:
        """Wait until everything was sent."""
        until = clock.monotonic() + timeout_s
        while not self._outbox.empty() and clock.monotonic() < until:
            clock.sleep(_RETRY_S)

    def _serve(self) -> None:
        adds = MsgpackDecoder(EngineCoreRequest)
        while True:
            self._frames = frames = Frames(self._listener.accept())
            try:
                while True:
                    self._take(frames, adds, *frames.receive())
            except (EOFError, OSError):
                self._frames = None
                frames.close()
                self.inbox.put((None, None, frames))

    def _take(self, frames: Frames, adds: Any, kind: Kind, parts: list[Any]) -> None:
        if kind is Kind.ADD:
            request = adds.decode(parts)
            core = self.core
            try:
                made = core.preprocess(request) if core else None
            except Exception as error:  # noqa: BLE001 - one request's fault
                name = getattr(request, "external_req_id", None) or request.request_id
                self.put(Kind.REFUSED, {name.partition("#")[0]: str(error)})
                return
            self.inbox.put((kind, made, frames))
            return
        value = pickle.loads(parts[0])  # noqa: S301 - our own process
        if kind is Kind.CALL and value[1] in self._at_once:
            number, method, _ = value
            frames.send_object(Kind.ANSWER, (number, self._at_once[method](), None))
            return
        self.inbox.put((kind, value, frames))

    def _send(self) -> None:
        encoder = MsgpackEncoder(size_threshold=_INLINE_BYTES)
        while True:
            kind, value, frames = self._outbox.get()
            try:
                if kind is Kind.OUTPUTS:
                    frames.send(kind, encoder.encode(value))
                else:
                    frames.send_object(kind, value)
            except OSError:
                continue  # `_serve` sees that the front is gone
