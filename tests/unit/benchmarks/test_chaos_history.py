"""The checker of the chaos benchmark must find the fault in each forged history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.chaos.answers import Answer
from benchmarks.chaos.check import check, gather, report, timeline
from benchmarks.chaos.faults import FAST, schedule
from benchmarks.chaos.history import (
    Accepted,
    Asked,
    Born,
    Broken,
    CancelAsked,
    Charged,
    Ended,
    Event,
    Fault,
    HistoryWriter,
    Joined,
    Lifted,
    Moved,
    Paid,
    Published,
    Seen,
    Trimmed,
    Trouble,
    ViolationKind,
    inheritance,
    read_history,
)
from benchmarks.chaos.record import record
from benchmarks.chaos.recovery import recoveries
from tests.support.builders import worker_json
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.replies import Reply, encode_reply
from tokenyard.protocol.wire import pack_tokens

TOKENS = [11, 12, 13, 14, 15, 16]
TEXT = "abcdef"
C, ID = "client-0", "1-1"


def answer(_: Asked) -> Answer:
    return Answer(TOKENS, TEXT)


def good() -> list[Event]:
    """One stream, read by its client and by a plain reader, without a fault."""
    return [
        Asked(100.0, C, ID, 6, stream=True, tokens=[1]),
        Accepted(100.1, C, ID),
        Moved(100.1, C, ID, "intake:normal"),
        Moved(100.2, C, ID, "lane:w.1"),
        Published(100.3, C, ID, "delta", 0, TOKENS[:2]),
        Published(100.4, C, ID, "delta", 2, TOKENS[2:4]),
        Published(100.5, C, ID, "result", 4, TOKENS, "completed", "w.1"),
        Seen(100.3, "client", C, ID, 0, TOKENS[:2], "ab"),
        Seen(100.4, "client", C, ID, 2, TOKENS[2:4], "cd"),
        Seen(100.5, "client", C, ID, 4, TOKENS[4:], "ef"),
        Ended(100.5, "client", C, ID, "completed", TOKENS, text=TEXT),
        Seen(100.3, "plain", C, ID, 0, TOKENS[:2]),
        Seen(100.4, "plain", C, ID, 2, TOKENS[2:4]),
        Ended(100.5, "plain", C, ID, "completed", TOKENS, seq=4, text=TEXT),
    ]


def found(events: list[Event]) -> set[str]:
    return {violation.kind for violation in check(gather(events), answer)}


def without(keep: Callable[[Event], bool]) -> list[Event]:
    return [event for event in good() if keep(event)]


def test_a_good_history_has_no_faults() -> None:
    history = gather(good())

    violations = check(history, answer)

    assert violations == []
    figures = report(history, violations)
    assert (figures.accepted, figures.results) == (1, 1)


def test_an_unacknowledged_request_may_be_missing() -> None:
    assert found([Asked(100.0, C, ID, 6, stream=True, tokens=[1])]) == set()


def test_a_lost_request_is_a_fault() -> None:
    # Accepted, then silence
    assert found(good()[:6]) == {"lost"}
    # Published, but its waiting clients never got it
    assert found(without(lambda one: not isinstance(one, Ended | Seen))) == {"lost"}


def test_a_second_result_is_a_fault() -> None:
    # A second result in the stream, although readers stop at the first
    second = Published(101.0, C, ID, "result", 4, TOKENS, "completed", "w.2")
    assert found([*good(), second]) == {"twice"}
    # A reader that got the result twice
    assert "twice" in found([*good(), Ended(101.0, "plain", C, ID, "completed", TOKENS, seq=4)])


@pytest.mark.parametrize(
    "end",
    [
        Ended(101.0, "again", C, ID, "completed", [*TOKENS[:5], 99], seq=0, text=TEXT),
        Ended(101.0, "again", C, ID, "completed", TOKENS[:5], seq=0, text=TEXT),
        Ended(101.0, "again", C, ID, "completed", TOKENS, seq=0, text="abcdeX"),
        Ended(101.0, "again", C, ID, "failed", TOKENS, seq=0, code="WORKER_LOST"),
        Ended(101.0, "again", C, ID, "cancelled", TOKENS[:4], seq=0),
    ],
)
def test_a_wrong_answer_is_a_fault(end: Ended) -> None:
    assert found([*good(), end]) == {"wrong"}


def test_a_wrong_answer_is_a_fault_even_if_all_readers_agree() -> None:
    other = [1, 2, 3]
    events: list[Event] = [
        *good()[:2],
        Published(100.5, C, ID, "result", 0, other, "completed", "w.1"),
        Ended(100.5, "plain", C, ID, "completed", other, seq=0),
    ]
    assert found(events) == {"wrong"}


def test_a_publication_that_differs_from_the_reading_is_a_fault() -> None:
    events = [
        Published(100.5, C, ID, "result", 4, [*TOKENS[:4], 0], "completed", "w.1")
        if isinstance(event, Published) and event.event == "result"
        else event
        for event in good()
    ]
    assert found(events) == {"wrong"}


def test_a_cancelled_request_may_end_with_a_prefix_of_its_answer() -> None:
    asked = Asked(100.0, C, ID, 6, stream=True, tokens=[1])

    def cancelled(tokens: list[int]) -> list[Event]:
        return [
            asked,
            Accepted(100.1, C, ID),
            CancelAsked(100.2, C, ID),
            Published(100.3, C, ID, "delta", 0, tokens),
            Published(100.5, C, ID, "result", len(tokens), tokens, "cancelled"),
            Seen(100.3, "plain", C, ID, 0, tokens),
            Ended(100.5, "plain", C, ID, "cancelled", tokens, seq=len(tokens), code="CANCELLED"),
        ]

    # After a cancel, a prefix of the answer is right. Other tokens are wrong,
    assert found(cancelled(TOKENS[:3])) == set()
    assert found(cancelled([99])) == {"wrong"}
    # and so is a prefix without a cancel.
    unasked = [one for one in cancelled(TOKENS[:3]) if not isinstance(one, CancelAsked)]
    assert found(unasked) == {"wrong"}


def test_a_deleted_entry_may_end_its_request() -> None:
    def lost(tokens: list[int]) -> list[Event]:
        return [
            Asked(100.0, C, ID, 6, stream=True, tokens=[1]),
            Accepted(100.1, C, ID),
            Trimmed(100.2, C, ID),
            Published(100.5, C, ID, "result", 0, tokens, "failed"),
            Ended(100.5, "plain", C, ID, "failed", tokens, seq=0, code="ENTRY_LOST"),
        ]

    # If the injector has deleted an entry, the request may end for that reason,
    assert found(lost(TOKENS[:2])) == set()
    assert report(gather(lost([])), []).entries_lost == 1
    assert found(lost([99])) == {"wrong"}
    # in both places where its client may listen, once in each.
    copies = [Published(100.5, C, ID, "result", 0, [], "failed", place=to) for to in ("a", "b")]
    assert found([*lost([])[:3], *copies, lost([])[-1]]) == set()
    assert found([*lost([]), *copies, copies[0]]) == {"twice"}
    # But it must end, and no other request may end so.
    assert found(lost([])[:3]) == {"lost"}
    assert found([one for one in lost([]) if not isinstance(one, Trimmed)]) == {"wrong"}


@pytest.mark.parametrize("reader", ["client", "plain"])
def test_a_gap_at_a_reader_is_a_fault(reader: str) -> None:
    def is_missing(event: Event) -> bool:
        return isinstance(event, Seen) and event.reader == reader and event.seq == 2

    assert found(without(lambda one: not is_missing(one))) == {"gap"}


def test_a_gap_before_the_result_is_a_fault() -> None:
    # The client never got the tail; by the stream's result, more tokens were shown.
    assert found(without(lambda one: not (isinstance(one, Seen) and one.seq == 4))) == {"gap"}
    assert found(without(lambda one: not (isinstance(one, Published) and one.seq == 2))) == {"gap"}


def test_a_gap_in_the_text_alone_is_a_fault() -> None:
    events = [
        Seen(100.5, "client", C, ID, 4, TOKENS[4:], "f")
        if isinstance(event, Seen) and event.seq == 4
        else event
        for event in good()
    ]
    assert found(events) == {"gap"}


def test_a_repeated_token_is_a_fault() -> None:
    again = Published(100.45, C, ID, "delta", 2, TOKENS[2:4])
    events = good()
    events.insert(6, again)
    assert found(events) == {"repeat"}
    # The same at a reader, whatever the stream has
    events = good()
    events.insert(9, Seen(100.45, "plain", C, ID, 0, TOKENS[:2]))
    assert found(events) == {"repeat"}


def test_a_publication_after_the_result_is_a_fault() -> None:
    assert "repeat" in found([*good(), Published(101.0, C, ID, "delta", 4, TOKENS[4:])])


@pytest.mark.parametrize("kind", ["gap", "repeat", "wrong", "status"])
def test_what_a_gateway_breaks_is_a_fault(kind: ViolationKind) -> None:
    assert found([*good(), Broken(101.0, C, ID, kind, "event 3 instead of 2")]) == {kind}


def test_a_new_life_inherits_what_was_accepted_and_not_answered(tmp_path: Path) -> None:
    writer = HistoryWriter(tmp_path / "history.jsonl")
    writer.write(Born(99.0, C), *good()[:1])
    assert inheritance(tmp_path / "history.jsonl") == (1, [])
    writer.write(Accepted(100.1, C, ID))
    assert inheritance(tmp_path / "history.jsonl") == (1, good()[:1])
    writer.write(Ended(100.5, "http", C, ID, "completed", TOKENS))
    assert inheritance(tmp_path / "history.jsonl") == (1, [])
    writer.close()


def test_recovery_time_runs_from_the_kill_to_the_next_token() -> None:
    # Given a stream whose worker is killed in the middle,
    history = gather(
        [
            Joined("w.1", 4242),
            Joined("x.2", 4243),
            Asked(100.0, C, ID, 6, stream=True, tokens=[1]),
            Moved(100.1, C, ID, "lane:w.1"),
            Published(100.3, C, ID, "delta", 0, TOKENS[:2]),
            Fault(100.5, "worker kill", "host-0", [4242]),
            Moved(100.6, C, ID, "intake:retry"),
            Moved(100.7, C, ID, "lane:x.2"),
            Published(100.8, C, ID, "delta", 2, TOKENS[2:4]),
            Published(101.0, C, ID, "result", 4, TOKENS, "completed", "x.2"),
            # and a kill of a worker without a stream
            Fault(100.9, "worker kill", "host-0", [4242]),
        ]
    )

    # I expect the time from the kill to the first token of the next attempt.
    [recovery] = recoveries(history, "worker kill")
    assert recovery.seconds == pytest.approx([0.3])


def test_the_timeline_is_in_order_of_time() -> None:
    [story] = gather([*good(), Trouble(100.05, C, ID, "ConnectionError")]).stories.values()

    lines = list(timeline(story))

    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)
    assert len(lines) == len(good()) - 1 + 1  # all but Accepted, and the fault


def test_a_history_is_read_back_from_its_files(tmp_path) -> None:
    # Given a history whose writer was killed in a write
    path = tmp_path / "history.jsonl"
    writer = HistoryWriter(path)
    writer.write(*good())
    writer.close()
    path.write_bytes(path.read_bytes() + b'{"type":"Asked","at":1')

    # I expect all complete records.
    assert list(read_history([path])) == good()


def sent(*words: str | bytes) -> list[bytes]:
    """A command as the broker's monitor shows it."""
    return [word if isinstance(word, bytes) else word.encode() for word in words]


def test_commands_of_the_broker_become_events() -> None:
    keys = Keys("chaos")
    delta = Reply(id=ID, event="delta", seq=0, tokens=pack_tokens(TOKENS[:2]))
    result = Reply(id=ID, event="result", seq=2, tokens=pack_tokens(TOKENS), status="completed")
    packed = [encode_reply(delta), encode_reply(result)]
    frame = b"\xdd" + len(packed).to_bytes(4, "big") + b"".join(packed)
    flat = ["id", ID, "event", "delta", "seq", "0", "tokens", delta.tokens]
    place = ["MAXLEN", "=", "10", "5000-0"]
    elsewhere = ["reply_to", f"replies:gateway.{'0' * 32}"]
    commands = [
        sent("SELECT", "0"),
        sent("XADD", keys.intake("low"), "5000-0", "id", ID, "client", C),
        sent("XADD", keys.lane("w.1"), "5000-1", "id", ID),
        sent("XADD", keys.replies(C), *place, "frame", frame),
        sent("XADD", keys.reply("anon", ID), *place, *flat),
        sent("XADD", keys.intake("low"), "5000-0", *("id", ID, "client", "http"), *elsewhere),
        sent("XADD", f"{keys.prefix}{elsewhere[1]}", *place, "frame", frame),
        sent("XADD", keys.events, *place, "event", "joined"),
        sent("HSET", keys.workers, "w.1", worker_json(pid=7)),
        sent("XADD", "tokenyard:{other}:intake:low", "5000-0", "id", "another yard's"),
    ]

    events = list(record(iter(commands), keys))

    assert events == [
        Moved(5.0, C, ID, "intake:low"),
        Moved(5.0, "anon", ID, "lane:w.1"),
        Published(5.0, C, ID, "delta", 0, TOKENS[:2], place="replies"),
        Published(5.0, C, ID, "result", 2, TOKENS, "completed", place="replies"),
        Published(5.0, "anon", ID, "delta", 0, TOKENS[:2], place="reply"),
        Moved(5.0, "http", ID, "intake:low"),
        Published(5.0, "http", ID, "delta", 0, TOKENS[:2], place="replies"),
        Published(5.0, "http", ID, "result", 2, TOKENS, "completed", place="replies"),
        Joined("w.1", 7),
    ]


def test_commands_about_tenants_become_events() -> None:
    keys = Keys("chaos")
    fields = ["id", ID, "client", C, "tenant", "acme"]
    ledger = keys.ledger(C, ID)
    commands = [
        sent("XADD", keys.intake("low:acme"), "5000-0", *fields),
        sent("XADD", keys.lane("w.1"), "5000-1", *fields),
        sent("HSET", ledger, "state", "assigned"),
        sent("HSET", ledger, "charge", "9.5 0.5 1 acme a model"),
        sent("HSET", ledger, "used", "4 17"),
        sent("HINCRBY", keys.tenant("acme"), "lifted", "70"),
        sent("HINCRBY", keys.tenant("acme"), "running", "1"),
    ]

    assert list(record(iter(commands), keys)) == [
        Moved(5.0, C, ID, "intake:low:acme", "acme"),
        Moved(5.0, C, ID, "lane:w.1", "acme"),
        Charged(C, ID, "acme", 9.5),
        Paid(C, ID, 4, 17),
        Lifted("acme"),
    ]


def test_the_schedule_depends_on_the_seed() -> None:
    assert schedule(7, 60, FAST) == schedule(7, 60, FAST)
    assert schedule(7, 60, FAST) != schedule(8, 60, FAST)
    assert {fault.kind[0] for fault in schedule(7, 60, FAST, ["broker"])} == {"broker"}
    assert all(0 < fault.at_s < 60 for fault in schedule(7, 60, FAST))
