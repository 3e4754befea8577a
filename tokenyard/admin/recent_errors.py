"""What has gone wrong in a yard lately, as far as it shows. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenyard.admin.dead_letters import DeadLetter
from tokenyard.admin.snapshot import YardView


@dataclass(frozen=True, slots=True)
class RecentError:
    """A recent error."""

    at_ms: int
    where: str
    what: str


def recent_errors(view: YardView, letters: Sequence[DeadLetter]) -> list[RecentError]:
    """Dead letters, errors of workers, and models that could not be loaded; the newest first."""
    return sorted(_errors(view, letters), key=lambda one: one.at_ms, reverse=True)


def _errors(view: YardView, letters: Sequence[DeadLetter]) -> Iterator[RecentError]:
    for letter in letters:
        yield RecentError(
            letter.died_ms, letter.id or letter.letter, f"dead letter: {letter.reason}"
        )
    for worker in view.workers:
        if worker.info and worker.info.last_error:
            yield RecentError(worker.info.last_error_ms, worker.info.name, worker.info.last_error)
    for host in view.hosts:
        for model in host.models:
            if model.fault:
                yield RecentError(model.faulted_ms, host.name, f"{model.name}: {model.fault}")
