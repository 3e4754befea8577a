"""What a service manager hears from a program: that it is up, gets on, and ends.

The protocol is that of systemd's sd_notify(3): datagrams to the socket that the variable
``NOTIFY_SOCKET`` names. Where there is none, nothing is said.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping


class ServiceManager:
    """Tells whoever has started this program how it gets on."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        """``address`` of a Unix socket; a name that begins with ``@`` is an abstract one.

        ``watchdog_s`` is how long it may hear nothing before it takes the program for hanging.
        """
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._every_s = watchdog_s / 4
        self._said_at = 0.0
        self._is_ready = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ServiceManager:
        """The one that the environment names, if any."""
        microseconds = environment.get("WATCHDOG_USEC", "")
        watchdog_s = int(microseconds) / 1e6 if microseconds.isdigit() else 0.0
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_s)

    def alive(self) -> None:
        """The program gets on; the first time it says that it is up. Cheap, so call it often."""
        now = time.monotonic()
        if not self._is_ready:
            self._is_ready = True
            self._tell("READY=1")
        elif self._every_s and now - self._said_at >= self._every_s:
            self._tell("WATCHDOG=1")
        else:
            return
        self._said_at = now

    def stopping(self) -> None:
        """It ends now, in order, and says no more."""
        self._tell("STOPPING=1")

    def _tell(self, state: str) -> None:
        if not self._address:
            return
        # A manager that is gone needs no news.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as teller,
        ):
            teller.settimeout(1.0)
            teller.sendto(state.encode(), self._address)
