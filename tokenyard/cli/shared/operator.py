"""Who gives orders to a yard."""

from __future__ import annotations

import getpass
import os
import socket


def operator() -> str:
    """The user and host that this runs as, as ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"
