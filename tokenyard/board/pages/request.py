"""The page of one request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tokenyard import clock
from tokenyard.board.page import NotFound, Parameters
from tokenyard.board.pages.requests import MOST_ENTRIES, MOST_KEYS_FOR_ID
from tokenyard.client.tokenization import Tokenizer, load_tokenizer
from tokenyard.ops.names import checked_request
from tokenyard.ops.requests import letters_of
from tokenyard.protocol.errors import BadInput, UnknownRequest
from tokenyard.protocol.keys import Yard, split_intake
from tokenyard.protocol.media import modalities_of
from tokenyard.protocol.replies import Result, split_result
from tokenyard.protocol.streams import decoded
from tokenyard.protocol.texts import counted, cut, listed, printable
from tokenyard.protocol.wire import DEFAULT_CLIENT, Request, prompt_value, unpack_tokens
from tokenyard.protocol.worker_info import decode_worker
from tokenyard.yard.history import RecentSamples
from tokenyard.yard.listing import find_owners
from tokenyard.yard.requests import TOKEN_BYTES, read_letter, read_submitted
from tokenyard.yard.timeline import Attempt, Timeline, read_timeline

log = logging.getLogger("tokenyard.board")


# The tokens of a running request: their number, and the last of them.

#: Tokens that are read at a look, however many there are.
MOST_TOKENS: Final = 512
#: Tokenizers that are kept, and so long without a look they make room for others.
_MOST_TOKENIZERS: Final = 4
_UNUSED_S: Final = 60.0


def last_tokens(yard: Yard, client: str, request_id: str) -> list[int]:
    """The last published tokens."""
    run: Any = yard.connection
    packed = run.getrange(yard.keys.tokens(client, request_id), -MOST_TOKENS * TOKEN_BYTES, -1)
    return unpack_tokens(packed) if len(packed) % TOKEN_BYTES == 0 else []


@dataclass(slots=True)
class _Kept:
    tokenizer: Tokenizer | None  # None: it could not be loaded
    used_s: float  # monotonic


class Tokenizers:
    """Tokenizers of models whose files are on this host; each is loaded beside the first look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}  # by path
        self._loading: set[str] = set()

    def text(self, yard: Yard, worker: str, tokens: Sequence[int]) -> tuple[str | None, bool]:
        """The text of tokens by the tokenizer of a worker's model; None where it is not known.

        The second is whether the tokenizer is being loaded.
        """
        path = _path_of(yard, worker) if tokens else ""
        if not path:
            return None, False
        with self._lock:
            kept = self._kept.get(path)
            if kept is None:
                return None, self._load_soon(path)
            kept.used_s = clock.monotonic()
            tokenizer = kept.tokenizer
        text = tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer else None
        return text, False

    def _load_soon(self, path: str) -> bool:
        """Begin to load it if there is room; whether it is being loaded."""
        if path in self._loading:
            return True
        if len(self._kept) + len(self._loading) >= _MOST_TOKENIZERS:
            since_s = clock.monotonic() - _UNUSED_S
            self._kept = {name: one for name, one in self._kept.items() if one.used_s > since_s}
        if len(self._kept) + len(self._loading) >= _MOST_TOKENIZERS:
            return False
        self._loading.add(path)
        threading.Thread(target=self._load, args=[path], daemon=True).start()
        return True

    def _load(self, path: str) -> None:
        tokenizer: Tokenizer | None = None
        try:
            tokenizer = load_tokenizer(path)
        except Exception as error:  # noqa: BLE001 - of any library that reads tokenizers
            log.warning("tokenizer %r: %s; token ids are shown", path, error)
        with self._lock:
            self._kept[path] = _Kept(tokenizer, clock.monotonic())
            self._loading.discard(path)


def _path_of(yard: Yard, worker: str) -> str:
    """The folder of the tokenizer of a worker's model, if it is on this host; else ""."""
    packed: Any = yard.connection.hget(yard.keys.workers, worker)
    info = decoded(packed, decode_worker) if packed else None
    path = info.tokenizer if info else ""
    return path if path and Path(path).is_absolute() and Path(path).is_dir() else ""


#: Most characters of one text on a page.
MOST_CHARACTERS: Final = 20_000
#: Most token ids of one list on a page.
MOST_IDS: Final = 2_000
#: Most inputs of a request whose numbers a page shows.
MOST_INPUTS: Final = 20

_TOKENIZERS: Final = Tokenizers()
_MOST_CHARACTERS: Final = 500


def view_request(yard: Yard, given: Parameters) -> dict[str, Any]:
    """The story of one request."""
    client, request_id = _named(yard, given)
    try:
        timeline = read_timeline(yard, client, request_id)
    except UnknownRequest as error:
        raise NotFound(
            f"{error}. The results of requests are kept for their result_ttl, an hour by default."
        ) from error
    ended_ms = timeline.ended_ms or 0
    owner = client, request_id
    letter = letters_of(yard, {owner: ended_ms}).get(owner)
    if letter:
        submitted = read_letter(yard, letter.letter, client, request_id)
    else:
        submitted = read_submitted(yard, client, request_id)
    request = submitted if isinstance(submitted, Request) else None
    shows = given.actor.shows_content
    parts = bar_of(timeline)
    return {
        "client": client,
        "id": request_id,
        "timeline": timeline,
        "events": timeline.events(),
        "since_ms": timeline.accepted_ms or ended_ms,
        "parts": parts,
        "phases": phases_of(parts),
        "width": WIDTH,
        "priority_class": split_intake(timeline.server_id.rpartition("/")[0])[0],
        "worker": timeline.attempts[-1].worker if timeline.attempts else "",
        "letter": letter,
        "request": request,
        "parameters": list(_parameters(request)) if request else [],
        "prompt_length": length_of(request) if request else "",
        "prompt": prompt_of(request) if request and shows else None,
        "answers": answers_of(timeline.result) if timeline.result and shows else [],
        "tokens": _tokens(yard, timeline, request, shows=shows),
        "is_ended": timeline.ended_ms is not None,
    }


def _named(yard: Yard, given: Parameters) -> tuple[str, str]:
    """Client and id in the address; the client may be left out where only one has the id."""
    client, request_id = given.raw("client"), given.raw("id")
    checked_request(client or DEFAULT_CLIENT, request_id)
    if client:
        return client, request_id
    owners = find_owners(yard, request_id, most_keys=MOST_KEYS_FOR_ID, most_entries=MOST_ENTRIES)
    until = "" if owners.is_whole else f" among the first {MOST_KEYS_FOR_ID:,} keys of the server"
    if not owners.clients:
        raise NotFound(
            f"No client has a request '{printable(request_id)}'{until}. Give its client."
        )
    if len(owners.clients) == 1 and owners.is_whole:
        return owners.clients[0], request_id
    raise BadInput(
        f"Several clients may have a request with this id;{until} these have one:"
        f" {listed(owners.clients)}. Give its client."
    )


def _tokens(
    yard: Yard, timeline: Timeline, request: Request | None, *, shows: bool
) -> dict[str, Any]:
    """Number and rate of what is published, and the last of it for those who may see it."""
    if timeline.ended_ms is not None:
        return {}
    key = (yard.keys.yard, timeline.client, timeline.id, timeline.server_id)
    count = timeline.tokens_published
    found: dict[str, Any] = {
        "count": count,
        "rate": token_rate(key, timeline.now_ms, count),
        "most": request.params.max_tokens if request else None,
        "ids": (),
        "text": None,
        "is_loading": False,
    }
    if shows and count and timeline.attempts:
        found["ids"] = last_tokens(yard, timeline.client, timeline.id)
        if request is None or request.params.n == 1:
            worker = timeline.attempts[-1].worker
            found["text"], found["is_loading"] = _TOKENIZERS.text(yard, worker, found["ids"])
    return found


def _parameters(request: Request) -> Iterator[tuple[str, str]]:
    """What was asked for, beside the prompt: names as in a submission, and values."""
    for name in ("model", "tenant", "session"):
        if value := getattr(request, name):
            yield name, cut(value, _MOST_CHARACTERS)
    if request.priority:
        yield "priority", str(request.priority)
    yield "result_ttl", f"{request.result_ttl_s:,} s"
    if request.stream:
        yield "stream", "yes"
    if request.pools:
        yield "task", request.task
    if media := modalities_of(request):
        yield "media", ", ".join(f"{count} {modality}" for modality, count in media.items())
    if request.query:
        yield "query", cut(request.query, _MOST_CHARACTERS)
    params = request.pooling if request.pools else request.params
    usual, always = type(params)(), () if request.pools else ("max_tokens", "temperature")
    for field in params.__struct_fields__:
        value = getattr(params, field)
        if value != getattr(usual, field) or field in always:
            yield field, cut(msgspec.json.encode(value).decode(), _MOST_CHARACTERS)
    if request.metadata:
        yield "metadata", counted(len(request.metadata), "field")
    if request.cache_salt:
        yield "cache_salt", "set"


#: Tokens of the requests that somebody looks at.
_SAMPLES: Final = RecentSamples[int](span_ms=10_000, apart_ms=200, least_ms=200)


def token_rate(request: Hashable, now_ms: int, tokens: int) -> float | None:
    """Note the number of tokens now; tokens per second lately, None at the first look."""
    before = _SAMPLES.add(request, now_ms, tokens)
    if before and tokens < before[1]:
        _SAMPLES.forget(request)  # it has ended, or runs under this id again
        return None
    return (tokens - before[1]) / before[0] if before else None


def _numbers_of(result: Result) -> Content:
    """The first numbers of one input, or why it has none."""
    if result.error is not None:
        return Content(result.error.message)
    numbers = memoryview(result.data or b"").cast("f")
    shown = " ".join(f"{one:.6g}" for one in numbers[:MOST_IDS])
    return Content(shown, cut=_left_out(len(numbers), MOST_IDS, "numbers"))


@dataclass(frozen=True, slots=True)
class Content:
    """A text, or token ids where there is none."""

    text: str
    is_ids: bool = False
    cut: str = ""  # what is missing, in words; empty: nothing


def content_of(text: str | None, tokens: Sequence[int]) -> Content:
    """The text, or the ids, with the length of what is left out."""
    if text is not None:
        cut = _left_out(len(text), MOST_CHARACTERS, "characters")
        return Content(text[:MOST_CHARACTERS], cut=cut)
    cut = _left_out(len(tokens), MOST_IDS, "token ids")
    return Content(" ".join(map(str, tokens[:MOST_IDS])), is_ids=True, cut=cut)


def _left_out(count: int, most: int, things: str) -> str:
    return f"{count - most:,} of {count:,} {things} are left out" if count > most else ""


def prompt_of(request: Request) -> Content:
    """The prompt of a request."""
    if request.tokens is not None:
        return content_of(None, unpack_tokens(request.tokens))
    if request.prompt is not None:
        return content_of(request.prompt, ())
    given = request.messages if request.inputs is None else request.inputs
    return content_of(msgspec.json.format(msgspec.json.encode(given)).decode(), ())


def length_of(request: Request) -> str:
    """The length of a prompt in words."""
    if request.tokens is not None:
        return counted(len(request.tokens) // 4, "token")
    if request.prompt is not None:
        return counted(len(request.prompt), "character")
    size, inputs = len(prompt_value(request)), request.inputs
    many = (
        counted(len(inputs), "input") if inputs else counted(len(request.messages or ()), "message")
    )
    return f"{many}, {size:,} bytes of JSON"


def answers_of(result: Result) -> list[Content]:
    """The answers of a result, one for each choice, or for each of the first inputs."""
    if result.choices:
        return [content_of(one.text, one.tokens) for one in result.choices]
    if result.shapes is not None:
        inputs = split_result(result, len(result.shapes))
        return [_numbers_of(one) for one in inputs[:MOST_INPUTS]]
    if not result.tokens and not result.text:
        return []
    return [content_of(result.text, result.tokens)]


# The life of a request as a bar: what it waited and ran, in proportion.

Phase = Literal["waiting", "lane", "prompt", "answer", "lost"]
#: Width of the whole bar.
WIDTH: Final = 1000
#: Parts are drawn at least so wide, so that each can be seen.
_LEAST: Final = 4
PHASES: Final[dict[Phase, str]] = {
    "waiting": "waiting in the queue",
    "lane": "on its worker, not running yet",
    "prompt": "reading the prompt",
    "answer": "running",
    "lost": "an attempt that was taken back",
}


def bar_of(timeline: Timeline) -> list[dict[str, Any]]:
    """The parts, from acceptance to the end or to now; none where it never arrived."""
    spans = [one for one in _spans(timeline) if one[2] >= 0]
    total = sum(took_ms for *_, took_ms in spans)
    if not spans or total <= 0:
        return []
    widths = [max(_LEAST, took_ms * WIDTH // total) for *_, took_ms in spans]
    parts, x = [], 0.0
    for (phase, name, took_ms), width in zip(spans, widths, strict=True):
        scaled = width * WIDTH / sum(widths)
        place = {"x": round(x), "width": round(x + scaled) - round(x)}
        parts.append({"phase": phase, "name": name, "took_ms": took_ms, **place})
        x += scaled
    return parts


def _spans(timeline: Timeline) -> Iterator[tuple[Phase, str, int]]:
    """The phases of a request's life: kind, label, milliseconds."""
    if timeline.accepted_ms is None:
        return
    end_ms = timeline.ended_ms or timeline.now_ms
    since_ms = timeline.accepted_ms
    for attempt in timeline.attempts:
        yield "waiting", _waits(attempt.number), attempt.assigned_ms - since_ms
        if attempt.given_back_ms is not None:
            name = f"attempt {attempt.number} on {attempt.worker}, taken back"
            yield "lost", name, attempt.given_back_ms - attempt.assigned_ms
            since_ms = attempt.given_back_ms
        else:
            yield from _last(timeline, attempt, end_ms)
            return
    yield "waiting", _waits(len(timeline.attempts) + 1), end_ms - since_ms


def _waits(number: int) -> str:
    return "waiting" if number == 1 else f"waiting for attempt {number}"


def _last(timeline: Timeline, attempt: Attempt, end_ms: int) -> Iterator[tuple[Phase, str, int]]:
    """The attempt that runs, or that ended with the request."""
    name = f"attempt {attempt.number} on {attempt.worker}"
    timing = timeline.result.timing if timeline.result else None
    started_ms = timeline.started_ms
    if started_ms is None or timing is None or started_ms < attempt.assigned_ms:
        yield "answer", name, end_ms - attempt.assigned_ms
        return
    first_ms = started_ms + int(timing.first_token_ms or 0)
    yield "lane", f"{name}, not running yet", started_ms - attempt.assigned_ms
    yield "prompt", f"{name}, to the first token", first_ms - started_ms
    yield "answer", f"{name}, to the end", end_ms - first_ms


def phases_of(parts: Sequence[dict[str, Any]]) -> list[tuple[Phase, str]]:
    """The phases in a bar, for its legend."""
    seen = {part["phase"] for part in parts}
    return [(phase, name) for phase, name in PHASES.items() if phase in seen]
