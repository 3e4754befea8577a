"""Printing answers: text for people, one JSON object a line for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from tokenyard.client import Handle
from tokenyard.replies import Choice, Delta, Result


class Printer:
    """Prints deltas and results, and remembers whether a request failed."""

    def __init__(self, *, as_json: bool, is_verbose: bool = False) -> None:
        self.failed = False
        self._as_json = as_json
        self._is_verbose = is_verbose
        self._is_inside = False  # deltas of an answer have been printed on the current line

    def accepted(self, handle: Handle) -> None:
        """Where a request stands in the line, for those who want to know."""
        if not self._is_verbose:
            return
        if self._as_json:
            place = {"position": handle.position, "eta_s": handle.eta_s}
            _echo_json({"event": "accepted", "id": handle.id, **place})
            return
        eta = f", about {handle.eta_s:g} s" if handle.eta_s is not None else ""
        known = "known already" if handle.position is None else f"{handle.position} before it{eta}"
        click.echo(f"request {handle.id!r}: {known}", err=True)

    def delta(self, delta: Delta) -> None:
        """A piece of an answer."""
        if self._as_json:
            _echo_json({"event": "delta", **_fields(delta)})
            return
        text = delta.text if delta.text is not None else _ids(delta.tokens) + ","
        click.echo(text, nl=False)
        self._is_inside = True

    def result(self, prompt: object, index: int, result: Result) -> None:
        """The end of an answer, and all of it where no delta came before."""
        self._print(result, {"event": "result", "index": index, "prompt": prompt})

    def whole(self, result: Result) -> None:
        """A result whose prompt is not at hand."""
        self._print(result, {"event": "result"})

    def _print(self, result: Result, about: dict[str, Any]) -> None:
        self.failed = self.failed or not result.ok
        if self._as_json:
            _echo_json(about | _fields(result))
        elif self._is_inside:
            self.stop()
        elif result.ok:
            for text in _texts(result):
                click.echo(text)
        if not result.ok:
            error = result.error
            reason = f"{error.code}: {error.message}" if error else result.status
            click.echo(f"Error: request {result.id!r}: {reason}", err=True)

    def stop(self) -> None:
        """End the line that deltas were printed on."""
        if self._is_inside:
            click.echo()
        self._is_inside = False


def _texts(result: Result) -> list[str]:
    """Each choice as text, or as token ids where there is none."""
    answers: Sequence[Choice | Result] = result.choices or [result]
    return [answer.text if answer.text is not None else _ids(answer.tokens) for answer in answers]


def _ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def _fields(value: Delta | Result) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value)
    return {name: field for name, field in fields.items() if field is not None}


def _echo_json(value: dict[str, Any]) -> None:
    click.echo(msgspec.json.encode(value))
