"""The scripts of the control stream: commands to controllers, and what came of them."""

from __future__ import annotations

from tokenyard.protocol.commands import (
    Acknowledgement,
    Command,
    command_fields,
    encode_acknowledgement,
)
from tokenyard.protocol.control import DesiredState, Order, encode_desired, order_fields
from tokenyard.scripts.calls import Arg, Caller


class ControlScripts(Caller):
    """Commanding and acknowledging."""

    def command(self, command: Command, token: str = "") -> str | None:
        """Command a worker; the command's id, or None for a deposed leader.

        The leader gives its ``token``; an operator needs none. Called again after an answer was
        lost, it commands twice, which does no harm: all commands are idempotent.
        """
        keys = [self.keys.leader, self.keys.control]
        args: list[Arg] = [token]
        for item in command_fields(command).items():
            args.extend(item)
        answer: bytes = self._run("command", keys, args)
        return answer.decode() or None

    def signal(self, order: Order, seen: bytes, now: DesiredState) -> str | None:
        """Change the desired state of the order's scope, and tell everybody; the signal's id.

        ``seen`` is its JSON as the caller found it; None where it is another by now: look again.
        So it is, too, where a call is made again after its answer was lost.
        """
        keys = [self.keys.desired, self.keys.control, self.keys.events]
        args: list[Arg] = [order.scope, seen, encode_desired(now)]
        for item in order_fields(order).items():
            args.extend(item)
        answer: bytes = self._run("signal", keys, args)
        return answer.decode() or None

    def acknowledge(self, command_id: str, acknowledgement: Acknowledgement) -> None:
        """Say what came of a command at one worker, and wake the leader."""
        keys = [self.keys.acks(command_id), self.keys.events]
        packed = encode_acknowledgement(acknowledgement)
        self._run("acknowledge", keys, [acknowledgement.worker, packed])
