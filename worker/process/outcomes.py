"""Converts engine events to published replies: pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec import Struct, field, structs

from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import (
    Choice,
    ErrorInfo,
    Provenance,
    Reply,
    Timing,
    Usage,
    json_text,
)
from tokenyard.protocol.wire import Assignment, pack_tokens
from tokenyard.scripts.answers import CancelledUse
from worker.engines import EngineInfo, Finished, PoolingOutput, RequestError, TokenDelta


class Run(Struct, eq=False):
    """A request in the engine, and how much of it is published."""

    assignment: Assignment
    began: float  # monotonic seconds
    epoch: int | None = None  # generation epoch in which it began here
    seq: int = 0  # tokens published, over all choices
    counted: int = 0  # tokens of a whole answer that `RunningStats` has counted before its end
    #: Tokens published of the first choice, packed.
    shown: bytearray = field(default_factory=bytearray)
    first_token: float | None = None
    has_stored_epoch: bool = False  # the ledger has the epoch of its first token
    compared_ms: int = 0  # the server's time when its attempt was last compared with the ledger
    interval_ms: int | None = None  # between its deltas; None before the first
    waited_ms: int = 0  # `Assignment.waited_ms`, which takes its time to be read

    def __post_init__(self) -> None:
        self.waited_ms = self.assignment.waited_ms
        if self.assignment.published:
            self.shown += pack_tokens(self.assignment.published_of(0))
            self.seq = len(self.assignment.published) // 4


@dataclass(frozen=True, slots=True)
class Expired:
    """A request whose deadline passed; ``where`` describes how far it was."""

    key: str
    made: Finished | None  # what the engine had generated
    where: str


@dataclass(frozen=True, slots=True)
class Remembered:
    """A request that this engine has answered, and whose result the server lost."""

    key: str
    reply: Reply


#: The end of a request.
End = Finished | RequestError | Expired | Remembered
Outcome = TokenDelta | End


def output_tokens(end: End) -> int:
    """Tokens that were made of a request; those of a remembered result were counted before."""
    made = end.made if isinstance(end, Expired) else end
    return made.output_tokens if isinstance(made, Finished) else 0


@dataclass(frozen=True, slots=True)
class Aborted:
    """A request that was perhaps cancelled, and then pays what was generated until now."""

    key: str
    charged: str  # <client>/<id>
    made: Finished | None  # what the engine had generated; None: it had not begun with it

    @property
    def used(self) -> CancelledUse:
        """What `settle_cancelled` takes."""
        client, _, request_id = self.charged.partition("/")
        if self.made is None:
            return CancelledUse(client, request_id, self.key)
        made, cached = self.made, self.made.cached_tokens or 0
        return CancelledUse(
            client, request_id, self.key, made.prompt_tokens, cached, made.output_tokens
        )


def charged_name(assignment: Assignment) -> str:
    """`Aborted.charged` of a request; "" where nobody pays for it."""
    request = assignment.request
    return f"{request.client}/{request.id}" if assignment.is_charged else ""


def merge(events: Iterable[Outcome]) -> list[Outcome]:
    """The events of several steps with the deltas of each choice joined.

    Deltas of a request that has ended are dropped: its result carries their tokens.
    """
    ends: dict[str, Outcome] = {}
    deltas: dict[tuple[str, int], TokenDelta] = {}
    several: dict[tuple[str, int], list[TokenDelta]] = {}  # choices with more than one delta
    for event in events:
        if not isinstance(event, TokenDelta):
            ends.setdefault(event.key, event)  # a deadline may pass after the result
            continue
        choice = event.key, event.index
        first = deltas.setdefault(choice, event)
        if first is not event:
            several.setdefault(choice, [first]).append(event)
    for choice, parts in several.items():
        deltas[choice] = _join(parts)
    joined = [delta for (key, _), delta in deltas.items() if key not in ends]
    return [*joined, *ends.values()]


def _join(parts: list[TokenDelta]) -> TokenDelta:
    first = parts[0]
    return TokenDelta(
        key=first.key,
        index=first.index,
        tokens=[token for part in parts for token in part.tokens],
        text=None if first.text is None else "".join(part.text or "" for part in parts),
        logprobs=None
        if first.logprobs is None
        else [entry for part in parts for entry in part.logprobs or ()],
        cached_tokens=first.cached_tokens,
        created_cache_tokens=first.created_cache_tokens,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
    )


def delta_reply(run: Run, delta: TokenDelta) -> Reply:
    """The reply for a delta; counts its tokens as published."""
    packed = pack_tokens(delta.tokens)
    reply = Reply(
        id=run.assignment.request.id,
        event="delta",
        seq=run.seq,
        tokens=packed,
        text=delta.text,
        index=delta.index,
        logprobs=None if delta.logprobs is None else json_text(delta.logprobs),
        cached_tokens=None if run.seq else delta.cached_tokens,
        created_cache_tokens=None if run.seq else delta.created_cache_tokens,
        finish_reason=delta.finish_reason,
        stop_reason=None if delta.stop_reason is None else json_text(delta.stop_reason),
    )
    run.seq += len(delta.tokens)
    if delta.index == 0:
        run.shown += packed
    return reply


def epoch_to_store(run: Run, delta: Reply, epoch: int | None) -> int | None:
    """The epoch that the ledger stores with this delta; None if it has one already.

    ``epoch`` is the one in which the delta was made. The next attempt reads when this one began.
    """
    if epoch is None or run.has_stored_epoch or not delta.tokens:
        return None
    run.has_stored_epoch = True
    if run.assignment.first_epoch is not None:
        return None
    return epoch if run.epoch is None else run.epoch


def result_reply(
    run: Run,
    end: End,
    info: EngineInfo,
    worker: str,
    now: float,
    epoch: int | None = None,
) -> Reply:
    """The reply for a result that was made in generation ``epoch``."""
    if isinstance(end, Remembered):
        return structs.replace(end.reply, seq=run.seq)
    provenance = _provenance(run, info, worker, epoch)
    timing = json_text(_timing(run, now))
    if isinstance(end, RequestError):
        return Reply(
            id=run.assignment.request.id,
            event="result",
            seq=run.seq,
            tokens=bytes(run.shown),
            status="failed",
            error=json_text(ErrorInfo(end.code, end.message)),
            provenance=provenance,
            timing=timing,
        )
    if isinstance(end, Expired):
        return _expired_reply(run, end, provenance, timing)
    choice = end.choices[0]
    return Reply(
        id=run.assignment.request.id,
        event="result",
        seq=run.seq,
        tokens=pack_tokens(choice.tokens),
        text=choice.text,
        status="completed",
        finish_reason=choice.finish_reason,
        stop_reason=None if choice.stop_reason is None else json_text(choice.stop_reason),
        usage=_usage(end),
        provenance=provenance,
        timing=timing,
        logprobs=None if choice.logprobs is None else json_text(choice.logprobs),
        prompt_logprobs=None if end.prompt_logprobs is None else json_text(end.prompt_logprobs),
        choices=_choices(end),
        **_numbers(end.pooling),
    )


def _numbers(pooling: PoolingOutput | None) -> dict[str, Any]:
    """The fields of a reply for what a task that pools has made."""
    if pooling is None:
        return {}
    errors = json_text(pooling.errors) if pooling.errors else None
    return {
        "data": pooling.data,
        "shapes": json_text(pooling.shapes),
        "errors": errors,
        "input_tokens": json_text(pooling.input_tokens),
    }


def _expired_reply(run: Run, end: Expired, provenance: str, timing: str) -> Reply:
    """The tokens made until the deadline, at least those that were published."""
    choice = end.made.choices[0] if end.made and end.made.choices else None
    made = pack_tokens(choice.tokens) if choice else b""
    longer = len(made) >= len(run.shown)
    message = f"the deadline passed while the request was {end.where}"
    return Reply(
        id=run.assignment.request.id,
        event="result",
        seq=run.seq,
        tokens=made if longer else bytes(run.shown),
        text=choice.text if choice and longer else None,
        status="expired",
        usage=_usage(end.made) if end.made else None,
        error=json_text(ErrorInfo(Code.DEADLINE_EXCEEDED, message)),
        provenance=provenance,
        timing=timing,
    )


def _choices(end: Finished) -> str | None:
    return json_text(list[Choice](end.choices)) if len(end.choices) > 1 else None


def _usage(end: Finished) -> str:
    return _usage_text(
        end.prompt_tokens, end.output_tokens, end.cached_tokens, end.created_cache_tokens
    )


@lru_cache(maxsize=1024)
def _usage_text(prompt: int, completion: int, cached: int | None, created: int | None) -> str:
    return json_text(Usage(prompt, completion, prompt + completion, cached, created))


def _provenance(run: Run, info: EngineInfo, worker: str, epoch: int | None) -> str:
    assignment = run.assignment
    asked = assignment.request.model
    first = run.epoch if assignment.first_epoch is None else assignment.first_epoch
    return _provenance_text(
        asked if asked in info.adapters else info.model,
        info.revision,
        info.engine,
        info.engine_version,
        worker,
        assignment.attempt,
        assignment.request.params.seed,
        epoch,
        None if first == epoch else first,
    )


@lru_cache(maxsize=1024)
def _provenance_text(*values: Any) -> str:
    """Cached: nearly all results of a worker have the same provenance."""
    return json_text(Provenance(*values))


def _timing(run: Run, now: float) -> Timing:
    first = run.first_token
    return Timing(
        queue_ms=run.waited_ms,
        engine_ms=round((now - run.began) * 1000, 3),
        first_token_ms=None if first is None else round((first - run.began) * 1000, 3),
    )
