"""The socket between a front and its core, when the core dies."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.support.waiting import eventually
from worker.engines import DeviceLost
from worker.engines.vllm.core_link import Frames, Kind, SocketLink

pytestmark = pytest.mark.vllm


@pytest.fixture
def pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SocketLink, Connection]]:
    """The link of a front, which would end its process, and its core's end."""
    address, ending = str(tmp_path / "core"), SimpleQueue[threading.Thread]()

    def end(status: int) -> None:
        ending.put(threading.current_thread())
        raise SystemExit(status)  # of the thread

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    monkeypatch.setattr("worker.engines.vllm.core_link._FAULT_S", 0.0)
    with Listener(address, "AF_UNIX") as listener, ThreadPoolExecutor(1) as pool:
        link = pool.submit(SocketLink, address, 10.0)
        with listener.accept() as core:
            yield link.result(10.0), core
        thread = ending.get(timeout=30.0)
        thread.join(30.0)  # else a later test would be told of its end
        assert not thread.is_alive()


def test_what_a_dying_core_does_not_take_is_no_error_of_the_front(
    pair: tuple[SocketLink, Connection],
) -> None:
    # Given a core whose last words are not read yet
    link, core = pair
    with socket.socket(fileno=os.dup(core.fileno())) as end:
        end.shutdown(socket.SHUT_RD)

    # When its front sends
    link.abort_requests(["q1"])

    # Then what ends the front is the core's error, not a broken pipe
    Frames(core).send_object(Kind.FAULT, ("DeviceLost", "the device is gone"))
    eventually(lambda: link.has_outputs)
    with pytest.raises(DeviceLost, match="the device is gone"):
        link.get_output()
