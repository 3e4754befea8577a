"""Prints answers: text for people, one JSON object per line for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenyard.cli.shared.console import say, say_answer
from tokenyard.cli.shared.request_owner import named
from tokenyard.client.sync import Handle
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Choice, Delta, Result, data_of_inputs
from tokenyard.protocol.texts import indented


class Printer:
    """Prints the deltas and results of one client's requests, and remembers which failed."""

    def __init__(self, client: str, *, as_json: bool, is_verbose: bool = False) -> None:
        self.failed: list[str] = []  # ids
        self._known: list[str] = []  # those that the yard knows
        self._client = client
        self._as_json = as_json
        self._is_verbose = is_verbose
        self._is_inside = False  # deltas of an answer have been printed on the current line

    def accepted(self, handle: Handle) -> None:
        """The position of an accepted request, if verbose."""
        if not self._is_verbose:
            return
        if self._as_json:
            place = {"position": handle.position, "eta_s": handle.eta_s}
            self._echo_json({"event": "accepted", "id": handle.id, **place})
            return
        eta = f", about {handle.eta_s:g} s" if handle.eta_s is not None else ""
        known = "known already" if handle.position is None else f"{handle.position} before it{eta}"
        about = f"tokenyard explain {named(self._client, handle.id)}"
        say(f"{self._name(handle.id)}: {known}; its timeline: {about}", err=True)

    def delta(self, delta: Delta) -> None:
        """A part of an answer."""
        if self._as_json:
            self._echo_json({"event": "delta", **_fields(delta)})
            return
        text = delta.text if delta.text is not None else _ids(delta.tokens) + ","
        say_answer(text, nl=False)
        self._is_inside = True

    def result(self, result: Result, **about: object) -> None:
        """The end of an answer, or all of it without deltas; with more ``about`` it in JSON."""
        if self._as_json:
            self._echo_json({"event": "result", **about, **_fields(result)})
        elif self._is_inside:
            self.stop()
        elif result.ok:
            for text in _texts(result):
                say_answer(text)
        if not result.ok:
            self.failed.append(result.id)
            error = result.error
            # A request that the client refused has no timeline.
            if result.timing is not None or (error and error.code != Code.INVALID_REQUEST):
                self._known.append(result.id)
            reason = f"{error.code}: {error.message}" if error else result.status
            say(f"Error: {self._name(result.id)}: {indented(reason)}", err=True)

    def hint(self) -> None:
        """Print how to examine failed requests, if there are any."""
        if len(self._known) == 1:
            about = f"tokenyard explain {named(self._client, self._known[0])}"
        elif self._known:
            about = f"tokenyard requests --client {self._client} --state failed"
        else:
            return
        say(f"Its timeline: {about}", err=True)

    def _name(self, request_id: str) -> str:
        return f"request {request_id!r} of client {self._client!r}"

    def _echo_json(self, value: dict[str, Any]) -> None:
        say(msgspec.json.encode({**value, "client": self._client}))

    def stop(self) -> None:
        """End the line that deltas were printed on."""
        if self._is_inside:
            say()
        self._is_inside = False


def _texts(result: Result) -> list[str]:
    """Each choice as text, or as token ids without text; or the numbers of each input."""
    if result.shapes is not None:
        return [msgspec.json.encode(numbers).decode() for numbers in _numbers(result)]
    answers: Sequence[Choice | Result] = result.choices or [result]
    return [answer.text if answer.text is not None else _ids(answer.tokens) for answer in answers]


def _ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def _numbers(result: Result) -> list[Any]:
    """The numbers of each input, in lists of their shape; null for one that has failed."""
    return [
        None if shape is None else _short(memoryview(data).cast("f", shape).tolist())
        for shape, data in data_of_inputs(result)
    ]


def _short(numbers: Any) -> Any:
    """Numbers of 32 bits, without digits that they do not have."""
    if isinstance(numbers, list):
        return [_short(one) for one in numbers]
    return float(f"{numbers:.9g}")


def _fields(value: Delta | Result) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value)
    if isinstance(value, Result) and value.shapes is not None:
        fields |= {"data": _numbers(value), "shapes": None}
    return {name: field for name, field in fields.items() if field is not None}
