"""Bounds the grammars of constraints on the text, and compiles them without a queue.

A grammar of a few KB can take minutes. vLLM compiles them in a few threads, in which the next ones
wait, and an unload waits for all of them. Nothing can stop a compilation; but each of them lets
other threads run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenyard import clock
from tokenyard.process.interpreter import start_deep
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.sampling import MAX_GRAMMAR_BYTES, grammar_fault
from tokenyard.protocol.wire import SamplingParams


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What the constraint of one request may take."""

    max_bytes: int = MAX_GRAMMAR_BYTES
    timeout_s: float = 10.0


def check_grammar(params: SamplingParams, limits: GrammarLimits) -> None:
    """Raise `InvalidRequest` for a constraint that is too large."""
    if params.structured_outputs is None:
        return
    given = msgspec.structs.asdict(params.structured_outputs)
    if fault := grammar_fault(given, limits.max_bytes):
        raise InvalidRequest("params.structured_outputs", fault)


class GrammarThreads:
    """Stands in for the executor of vLLM's `StructuredOutputManager`: a thread for each grammar."""

    def __init__(self, limits: GrammarLimits) -> None:
        self.key = ""  # lane entry of the request that is being added
        self._limits = limits
        self._compiling: dict[str, list[_Compilation]] = {}  # by lane entry
        self._abandoned: list[_Compilation] = []

    def stand_in(self, core: Any) -> None:
        """Take the place of the executor of a core in this process."""
        manager: Any = getattr(core, "structured_output_manager", None)
        if hasattr(manager, "executor"):  # not without a tokenizer
            manager.executor = self

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Begin to compile. The grammar never becomes an error, which older vLLMs die of."""
        compilation = _Compilation(function, arguments)
        self._compiling.setdefault(self.key, []).append(compilation)
        return compilation.grammar

    def shutdown(self, **_: object) -> None:
        """Wait for nothing."""

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar, as of the last `refused`."""
        return bool(self._compiling)

    @property
    def is_stuck(self) -> bool:
        """Whether a grammar that nobody waits for takes ten times as long as it may.

        Any thread may ask.
        """
        most_s = 10 * self._limits.timeout_s
        return any(one.age_s > most_s and one.thread.is_alive() for one in self._abandoned)

    def refused(self) -> dict[str, str]:
        """The requests whose grammars cannot be compiled, by lane entry, with the reasons."""
        reasons, limit_s = dict[str, str](), self._limits.timeout_s
        for key, compilations in list(self._compiling.items()):
            waiting = [one for one in compilations if not one.grammar.done()]
            why = next((one.error for one in waiting if one.error), "")
            if not why and any(one.age_s > limit_s for one in waiting):
                why = f"takes more than {limit_s:g} s to compile (grammar_timeout_s)"
            if why:
                reasons[key] = why
            if why or not waiting:
                self.forget(key)
        return reasons

    def forget(self, key: str) -> None:
        """A request is gone, or has its grammars."""
        gone = self._compiling.pop(key, ())
        if gone:
            known = [*self._abandoned, *gone]
            self._abandoned = [one for one in known if one.thread.is_alive()]


class _Compilation:
    """One grammar in its thread, which does not keep the process from ending."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.grammar: Future[Any] = Future()
        self.error = ""
        self._work = function, arguments
        self._began = clock.monotonic()
        self.thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        start_deep(self.thread)

    @property
    def age_s(self) -> float:
        return clock.monotonic() - self._began

    def _run(self) -> None:
        function, arguments = self._work
        try:
            self.grammar.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001  # whatever the library raises
            self.error = f"cannot be compiled: {error}"[:1000]
