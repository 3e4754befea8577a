"""The scripts of operators: commands to controllers, their outcomes, settings of tenants."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenyard.protocol.control import Acknowledgement, Command, DesiredState, Order, encode_desired
from tokenyard.scripts.calls import Arg, Caller, LostLeadership


class ControlScripts(Caller):
    """Commands, signals and acknowledgements."""

    def command(self, command: Command, token: str = "") -> str:
        """Command a worker; returns the command's id.

        The leader passes its ``token``; an operator needs none. Raises `LostLeadership`. A repeated
        call after a lost answer commands twice, which is harmless: all commands are idempotent.
        """
        keys = [self.keys.leader, self.keys.control]
        args: list[Arg] = [token, "command", msgspec.json.encode(command)]
        answer: bytes = self._run("command", keys, args)
        if not answer:
            raise LostLeadership
        return answer.decode()

    def signal(self, order: Order, seen: bytes, now: DesiredState) -> str | None:
        """Change the desired state of the order's scope and announce it; returns the signal's id.

        ``seen`` is the state's JSON as the caller has read it. Returns None where it has changed
        since: read it again. A repeated call after a lost answer also returns None.
        """
        keys = [self.keys.desired, self.keys.control, self.keys.events]
        args: list[Arg] = [order.scope, seen, encode_desired(now)]
        args += ["signal", msgspec.json.encode(order)]
        answer: bytes = self._run("signal", keys, args)
        return answer.decode() or None

    def configure(self, changes: Sequence[tuple[str, bytes, bytes]]) -> bool:
        """Change settings of tenants and announce it: name, JSON as read, new JSON; b"" for none.

        Returns False where one of them has changed since it was read: nothing is written. A
        repeated call after a lost answer also returns False.
        """
        args = [arg for change in changes for arg in change]
        return bool(self._run("configure", [self.keys.tenants, self.keys.events], args))

    def acknowledge(self, command_id: str, acknowledgement: Acknowledgement) -> None:
        """Report the outcome of a command at one worker, and wake the leader."""
        keys = [self.keys.acks(command_id), self.keys.events]
        packed = msgspec.json.encode(acknowledgement)
        self._run("acknowledge", keys, [acknowledgement.worker, packed])
