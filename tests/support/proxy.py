"""A TCP proxy before a server, which fails in each way that proxies and networks do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Final, Literal, get_args

Fault = Literal["refuse", "drop", "reset", "freeze", "cut", "half"]
#: refuse: nobody listens. drop: connections are accepted and closed, as by a proxy without a
#: backend. reset: the same, by RST. freeze: nothing comes through, and nothing ends. cut: a
#: connection ends with its next reply. half: the same in the middle of that reply.
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
_RESET: Final = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to a port of this host until it is broken."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._fault: Fault | None = None
        self._is_well = threading.Event()
        self._was_hit = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]
        self._is_well.set()

    def fail(self, fault: Fault) -> None:
        """Break it in this way, open connections included."""
        self._was_hit.clear()
        self._is_well.clear()
        self._fault = fault
        if fault == "refuse":
            _end(self._listener, resets=False)
        if fault in ("refuse", "drop", "reset"):
            self._end_all(resets=fault == "reset")

    def wait_for_hit(self, timeout_s: float) -> bool:
        """Wait until somebody has met the fault; of refused connections nobody knows."""
        return self._fault == "refuse" or self._was_hit.wait(timeout_s)

    def heal(self) -> None:
        """Forward again."""
        fault, self._fault = self._fault, None
        if fault == "refuse":
            self._listener = self._listen(self.port)
        self._is_well.set()

    def close(self) -> None:
        """End all connections."""
        self._fault = "refuse"
        self._is_well.set()
        _end(self._listener, resets=False)
        self._end_all(resets=False)

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._accept, args=(listener,), name="proxy", daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                client, _ = listener.accept()
                if self._fault in ("drop", "reset"):
                    self._was_hit.set()
                    _end(client, resets=self._fault == "reset")
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._open |= {client, server}
                for source, sink, replies in ((client, server, False), (server, client, True)):
                    threading.Thread(
                        target=self._pump, args=(source, sink, replies), name="proxy", daemon=True
                    ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                fault = self._fault
                if fault == "freeze":
                    self._was_hit.set()
                    self._is_well.wait()
                elif fault in ("cut", "half") and replies:
                    sink.sendall(data if fault == "cut" else data[: len(data) // 2])
                    self._was_hit.set()
                    break
                sink.sendall(data)
        with self._lock:
            self._open -= {source, sink}
        for one in (source, sink):
            _end(one, resets=False)

    def _end_all(self, *, resets: bool) -> None:
        with self._lock:
            ended, self._open = self._open, set()
        for one in ended:
            self._was_hit.set()
            _end(one, resets=resets)


def _end(one: socket.socket, *, resets: bool) -> None:
    with contextlib.suppress(OSError):  # it is closed, or was never connected
        if resets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            one.shutdown(socket.SHUT_RDWR)
    one.close()
