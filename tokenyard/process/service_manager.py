"""Notifications to a service manager: ready, alive, stopping.

The protocol is that of systemd's sd_notify(3): datagrams to the socket in the variable
``NOTIFY_SOCKET``. Without that nothing is sent.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from tokenyard import clock


class ServiceManager:
    """The service manager that has started this program, if any."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """``NOTIFY_SOCKET`` is a Unix socket; a name that begins with ``@`` is an abstract one.

        After ``WATCHDOG_USEC`` without a notification, the manager considers the program hung.
        """
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog_us = environment.get("WATCHDOG_USEC", "")
        self._every_s = int(watchdog_us) / 1e6 / 4 if watchdog_us.isdigit() else 0.0
        self._sent_at = 0.0
        self._is_ready = False

    def alive(self) -> None:
        """Notify that the program is alive, or at first ready; cheap, so call it often."""
        now = clock.monotonic()
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1")
        elif self._every_s and now - self._sent_at >= self._every_s:
            self._send("WATCHDOG=1")
        else:
            return
        self._sent_at = now

    def stopping(self) -> None:
        """Notify that the program ends in order."""
        self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        # The manager may be gone.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.settimeout(1.0)
            sender.sendto(state.encode(), self._address)
