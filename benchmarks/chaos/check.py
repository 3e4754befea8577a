"""The checker of a chaos run: finds lost, duplicated, wrong and incomplete answers in the events.

It does not know how the yard works, only what it promises (guarantees G1 to G4):

lost    an acknowledged request without a published result, or a reader without a result
twice   more than one published result
wrong   a result that is not the right answer, that two readers see differently, or that is
        neither `completed`, nor a requested `cancelled`, nor the `ENTRY_LOST` of an entry that
        the injector deleted
gap     a reader, or the published stream itself, skips tokens; or a stream over HTTP skips an
        event, or ends as if it were whole
repeat  … gets tokens twice
status  a gateway answers with a status that it may not give
tenant  a request is in the intake of another tenant, or charged to it
count   a counter of tenants differs from the history (`benchmarks.chaos.accounts`)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.chaos.answers import Answer
from benchmarks.chaos.history import (
    ENTRY_LOST,
    Accepted,
    Asked,
    Born,
    Broken,
    CancelAsked,
    Charged,
    Ended,
    Event,
    Fault,
    Joined,
    Key,
    Lifted,
    Missed,
    Moved,
    Paid,
    Published,
    Resumed,
    Seen,
    Trimmed,
    Trouble,
    ViolationKind,
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise broken for one request."""

    kind: ViolationKind
    key: Key
    what: str


@dataclass(slots=True)
class Story:
    """All events of one request."""

    asked: Asked | None = None
    is_accepted: bool = False
    is_cancelled: bool = False
    is_trimmed: bool = False
    seen: dict[str, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[str, list[Ended]] = field(default_factory=lambda: defaultdict(list))
    published: list[Published] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    charged: list[Charged] = field(default_factory=list)
    paid: list[Paid] = field(default_factory=list)
    trouble: list[Trouble] = field(default_factory=list)
    resumed: list[Resumed] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)

    @property
    def results(self) -> list[Published]:
        """The published results.

        The reply address is lost with a deleted entry, so its result goes to both places and
        counts once.
        """
        found = [one for one in self.published if one.event == "result"]
        if self.is_trimmed and len({one.place for one in found}) == len(found):
            return found[:1]
        return found

    @property
    def is_over_http(self) -> bool:
        """Whether a gateway was asked."""
        return self.asked is not None and bool(self.asked.key)

    @property
    def is_of_tenant(self) -> bool:
        """Whether it has a tenant."""
        return self.asked is not None and bool(self.asked.tenant)

    @property
    def lanes(self) -> int:
        """How many times it came to a lane."""
        return sum(one.place.startswith("lane:") for one in self.moved)

    def take(self, event: Event) -> None:
        """Add one of this request's events."""
        match event:
            case Asked():
                self.asked = event
            case Accepted():
                self.is_accepted = True
            case CancelAsked():
                self.is_cancelled = True
            case Trimmed():
                self.is_trimmed = True
            case _:
                self._keep(event)

    def _keep(self, event: Event) -> None:
        match event:
            case Seen():
                self.seen[event.reader].append(event)
            case Ended():
                self.ended[event.reader].append(event)
            case Published():
                self.published.append(event)
            case Moved():
                self.moved.append(event)
            case Charged():
                self.charged.append(event)
            case Paid():
                self.paid.append(event)
            case Trouble():
                self.trouble.append(event)
            case Resumed():
                self.resumed.append(event)
            case Broken():
                self.broken.append(event)


@dataclass(slots=True)
class History:
    """The events of a run, grouped by subject."""

    stories: dict[Key, Story] = field(default_factory=lambda: defaultdict(Story))
    faults: list[Fault] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)
    workers: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # by pid
    lifts: Counter[str] = field(default_factory=Counter)  # by tenant


def gather(events: Iterable[Event]) -> History:
    """Group events; those of one request must be in chronological order."""
    history = History()
    for event in events:
        match event:
            case Fault():
                history.faults.append(event)
            case Missed():
                history.missed.append(event)
            case Born():
                continue
            case Lifted():
                history.lifts[event.tenant] += 1
            case Joined():
                history.workers[event.pid].add(event.worker)
            case _:
                history.stories[event.client, event.id].take(event)
    return history


def check(history: History, answer_to: Callable[[Asked], Answer]) -> list[Violation]:
    """Find all violations."""
    return [
        Violation(kind, key, what)
        for key, story in history.stories.items()
        for kind, what in _check(story, answer_to)
    ]


def _check(
    story: Story, answer_to: Callable[[Asked], Answer]
) -> Iterator[tuple[ViolationKind, str]]:
    yield from _check_results(story)
    if story.asked is not None:
        yield from _check_answers(story, answer_to(story.asked))
        yield from _check_tenant(story, story.asked.tenant)
    yield from _check_published(story)
    yield from ((one.kind, one.what) for one in story.broken)
    for reader in story.seen.keys() | story.ended.keys():
        yield from _check_reader(reader, story.seen[reader], story.ended[reader])


def _check_results(story: Story) -> Iterator[tuple[ViolationKind, str]]:
    count = len(story.results)
    if story.is_accepted and not count:
        yield "lost", "accepted, but no result was published"
    elif story.is_accepted and not any(story.ended.values()):
        yield "lost", "a result was published, but no reader got it"
    if count > 1:
        yield "twice", f"{count} results were published"
    for reader, results in story.ended.items():
        if len(results) > 1:
            yield "twice", f"{reader} got {len(results)} results"


def _check_answers(story: Story, answer: Answer) -> Iterator[tuple[ViolationKind, str]]:
    results = [result for results in story.ended.values() for result in results]
    for result in results:
        fault = _fault_of(result, answer, story)
        if fault:
            yield "wrong", f"{result.reader}: {fault}"
        elif (result.status, result.tokens) != (results[0].status, results[0].tokens):
            yield "wrong", f"{result.reader} and {results[0].reader} got different results"
    for one in story.results:
        if results and (one.status, one.tokens) != (results[0].status, results[0].tokens):
            yield "wrong", f"{results[0].reader} got another result than was published"


def _fault_of(result: Ended, answer: Answer, story: Story) -> str:
    if result.status == "completed":
        return answer.fault_of(result)
    is_cut = result.status == "cancelled" and story.is_cancelled
    is_cut |= result.code == ENTRY_LOST and story.is_trimmed
    if not is_cut:
        return f"{result.status} {result.code}"
    return "" if answer.begins_with(result.tokens) else f"{result.status} with other tokens"


def _check_tenant(story: Story, tenant: str) -> Iterator[tuple[ViolationKind, str]]:
    for one in story.moved:
        owner = one.place.partition(":")[2].partition(":")[2]
        if one.tenant != tenant or owner not in ("", tenant):
            yield "tenant", f"of {tenant!r}, in {one.place} as of {one.tenant!r}"
    for charge in story.charged:
        if charge.tenant != tenant:
            yield "tenant", f"of {tenant!r}, charged to {charge.tenant!r}"


def _check_published(story: Story) -> Iterator[tuple[ViolationKind, str]]:
    """Check the published stream as a reader of all its entries sees it."""
    deltas = [(one.seq, one.tokens) for one in story.published if one.event == "delta"]
    end = next(iter(story.results), None)
    tail = None if end is None else (end.seq, end.tokens)
    yield from _check_stream("published", deltas, tail)
    closed = False
    for one in story.published:
        if closed and one.event == "delta":
            yield "repeat", "a delta was published after the result"
        closed = closed or one.event == "result"


def _check_reader(
    reader: str, seen: Sequence[Seen], ended: Sequence[Ended]
) -> Iterator[tuple[ViolationKind, str]]:
    deltas = [(one.seq, one.tokens) for one in seen]
    end = next(iter(ended), None)
    if end is None:
        yield from _check_stream(reader, deltas, None)
        return
    tail = len(end.tokens) if end.seq is None else end.seq
    yield from _check_stream(reader, deltas, (tail, end.tokens))
    if end.seq is None and end.text is not None:
        shown = "".join(one.text or "" for one in seen)
        if shown != end.text:
            yield "gap", f"{reader}: the texts of the deltas make {shown!r}, not {end.text!r}"


def _check_stream(
    reader: str,
    deltas: Sequence[tuple[int, list[int]]],
    end: tuple[int, list[int]] | None,
) -> Iterator[tuple[ViolationKind, str]]:
    """Check that each delta starts where the previous one ended, and that the result agrees.

    ``end`` has the number of tokens shown before the result, as the result reports it, and all
    tokens of the result.
    """
    shown: list[int] = []
    for seq, tokens in deltas:
        if seq != len(shown):
            yield _jump(seq, len(shown)), f"{reader}: delta at {seq} behind {len(shown)} tokens"
            return
        shown += tokens
    if end is None:
        return
    seq, whole = end
    if seq != len(shown):
        yield _jump(seq, len(shown)), f"{reader}: result at {seq} behind {len(shown)} tokens"
    elif whole[: len(shown)] != shown:
        yield "gap", f"{reader}: the deltas are no beginning of the result"


def _jump(seq: int, shown: int) -> ViolationKind:
    return "gap" if seq > shown else "repeat"


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run."""

    accepted: int
    results: int
    cancelled: int
    entries_lost: int
    over_http: int  # of the accepted
    of_tenants: int  # of the accepted
    of_tenants_over_http: int  # of these
    charged_again: int  # of these, after an attempt that was lost
    resumed: int  # streams over HTTP that went on behind an event
    hinted: int  # of these, behind the hint of a gateway that stopped
    violations: Sequence[Violation]
    kills: Counter[str]  # faults by kind

    def count(self, *kinds: ViolationKind) -> int:
        """Requests with a violation of these kinds."""
        return len({one.key for one in self.violations if one.kind in kinds})


def report(history: History, violations: Sequence[Violation]) -> Report:
    """Compute the figures of a run."""
    stories = history.stories.values()
    return Report(
        accepted=sum(story.is_accepted for story in stories),
        results=sum(len(story.results) for story in stories),
        cancelled=sum(one.status == "cancelled" for story in stories for one in story.results),
        entries_lost=sum(
            any(one.code == ENTRY_LOST for ends in story.ended.values() for one in ends)
            for story in stories
        ),
        over_http=sum(story.is_accepted and story.is_over_http for story in stories),
        of_tenants=sum(story.is_accepted and story.is_of_tenant for story in stories),
        of_tenants_over_http=sum(
            story.is_accepted and story.is_of_tenant and story.is_over_http for story in stories
        ),
        charged_again=sum(story.is_of_tenant and story.lanes > 1 for story in stories),
        resumed=sum(bool(story.resumed) for story in stories),
        hinted=sum(any(one.hints for one in story.resumed) for story in stories),
        violations=violations,
        kills=Counter(fault.kind for fault in history.faults),
    )


def timeline(story: Story) -> Iterator[str]:
    """The events of one request in chronological order, one line each."""
    own: list[Event] = [*story.moved, *story.published, *story.trouble, *story.resumed]
    own += [one for seen in story.seen.values() for one in seen]
    own += [one for ended in story.ended.values() for one in ended]
    began = story.asked.at if story.asked else 0.0
    if story.asked:
        yield f"+0.000 {story.asked}"
    timed = [(one.at, one) for one in own if not isinstance(one, Joined | Charged | Paid | Lifted)]
    for at, event in sorted(timed, key=lambda pair: pair[0]):
        yield f"{at - began:+.3f} {_line(event)}"


def _line(event: Event) -> str:
    match event:
        case Moved():
            return f"to {event.place}"
        case Published():
            who = f" {event.status} by {event.worker}" if event.status else ""
            return f"published {event.event} at {event.seq}, {len(event.tokens)} tokens{who}"
        case Seen():
            return f"{event.reader} saw delta at {event.seq}, {len(event.tokens)} tokens"
        case Ended():
            return f"{event.reader} got {event.status} {event.code}, {len(event.tokens)} tokens"
        case _:
            return str(event)
