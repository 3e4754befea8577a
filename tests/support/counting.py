"""Counts what a client sends."""

from __future__ import annotations

from typing import Any, ClassVar

import redis


class Counting(redis.Connection):
    """A connection that knows which commands it has sent."""

    sent: ClassVar[list[str]] = []

    def send_command(self, *args: Any, **options: Any) -> Any:
        self.sent.append(str(args[0]))
        return super().send_command(*args, **options)

    def pack_commands(self, commands: Any) -> Any:
        self.sent.extend(str(one[0]) for one in commands)
        return super().pack_commands(commands)
