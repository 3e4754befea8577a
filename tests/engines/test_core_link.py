"""The socket between a front and its core, when the core dies."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path

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
    address, ended = str(tmp_path / "core"), threading.Event()

    def end(status: int) -> None:
        ended.set()
        raise SystemExit(status)  # of the thread

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("worker.engines.vllm.core_link._FAULT_S", 0.0)
    with Listener(address, "AF_UNIX") as listener, ThreadPoolExecutor(1) as pool:
        link = pool.submit(SocketLink, address, 10.0)
        with listener.accept() as core:
            yield link.result(10.0), core
        assert ended.wait(30.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of `end`
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
