"""The backlog: queues by model, back-off, deadlines, demand, and when something is due."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coordinator.dispatch.intake
from coordinator.dispatch.admission import refuse
from coordinator.dispatch.backlog import MOST_STALE, Backlog, DelayQueue
from coordinator.dispatch.intake import BacklogReconciler
from coordinator.dispatch.shares import PriorityQueue
from coordinator.placement.needs import Demand
from coordinator.routing.queued_request import QueuedRequest, prompt_tokens
from tests.support.builders import make_request
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass
from tokenyard.protocol.streams import position
from tokenyard.protocol.wire import ChatOptions, Refused, chat_fields

NOW_MS = 1_000_000.0


def queued(
    name: str, intake: IntakeClass = "normal", *, suspect: bool = False, **fields: Any
) -> QueuedRequest:
    known = {"model": "m", "tokens": 3, "since_ms": NOW_MS, "trial": 1 if suspect else None}
    return QueuedRequest(intake=intake, entry=name, id=name, **(known | fields))


def holding(*all_of: QueuedRequest) -> Backlog:
    backlog = Backlog()
    for one in all_of:
        backlog.add(one)
    return backlog


def names(backlog: Backlog, model: str = "m") -> list[str]:
    queue = backlog.queue(model)
    return [] if queue is None else [one.entry for one in queue.others]


def late(backlog: Backlog) -> list[str]:
    return [one.entry for one in backlog.late(99)]


class TestOrder:
    def test_classes_in_order_and_first_come_first_served(self) -> None:
        backlog = holding(*(queued(f"{c}{n}", c) for n in (1, 2) for c in reversed(INTAKE_CLASSES)))

        assert names(backlog) == [f"{name}{number}" for name in INTAKE_CLASSES for number in (1, 2)]

    def test_suspects_have_a_queue_of_their_own(self) -> None:
        backlog = holding(queued("r", "retry"), queued("s", "retry", suspect=True))

        queue = backlog.queue("m")
        assert [one.entry for one in queue.suspects] == ["s"]
        assert names(backlog) == ["r"]
        assert [one.entry for one in queue] == ["s", "r"]

    def test_an_entry_that_is_read_twice_is_queued_once(self) -> None:
        backlog = holding(queued("r1"), queued("r2", deadline_ms=7), queued("r1"))
        backlog.add(queued("r2"))

        assert names(backlog) == ["r1", "r2"]
        assert (len(backlog), backlog.demands(NOW_MS)[0].tokens) == (2, 6)


class TestTime:
    def test_late_requests_leave_their_queue(self) -> None:
        backlog = holding(
            queued("late", deadline_ms=int(NOW_MS)),
            queued("earlier", "low", deadline_ms=int(NOW_MS) - 1),
            queued("suspect", "retry", suspect=True, deadline_ms=int(NOW_MS) - 2),
            queued("soon", deadline_ms=int(NOW_MS) + 1),
        )

        backlog.advance(NOW_MS)

        assert late(backlog) == ["suspect", "earlier", "late"]
        assert names(backlog) == ["soon"]
        assert len(backlog) == 4, "they are held until they are answered"
        assert backlog.next_ms == NOW_MS + 1
        assert [one.entry for one in backlog.late(2)] == ["suspect", "earlier"]


class TestDemand:
    def test_demand_is_requests_tokens_and_the_oldest_wait_of_each_model(self) -> None:
        backlog = holding(
            queued("a1", model="a", tokens=10, since_ms=NOW_MS - 500),
            queued("a2", "high", model="a", tokens=5, since_ms=NOW_MS - 3000),
            queued("a3", "retry", model="a", tokens=1, since_ms=NOW_MS - 1000, suspect=True),
            queued("b1", model="b", tokens=7, since_ms=NOW_MS + 10),
        )

        assert backlog.demands(NOW_MS) == [Demand("a", 3, 16, 3.0), Demand("b", 1, 7, 0.0)]

    def test_demand_excludes_back_off_late_and_removed_requests(self) -> None:
        now = int(NOW_MS)
        left = queued("left", tokens=100)
        backlog = holding(
            left,
            queued("stays", tokens=2),
            queued("pauses", "retry", tokens=4, not_before_ms=now + 1000),
            queued("late", tokens=8, deadline_ms=now),
        )
        backlog.remove(left)

        assert backlog.demands(NOW_MS) == [Demand("m", 1, 2, 0.0)]
        assert backlog.demands(NOW_MS + 1000) == [Demand("m", 2, 6, 1.0)]

    def test_counts_by_model_include_back_off(self) -> None:
        backlog = holding(
            queued("waits", tenant="acme"),
            queued("pauses", "retry", not_before_ms=int(NOW_MS) + 1000),
            queued("other", model="b"),
        )

        assert backlog.by_model() == {"m": 2, "b": 1}

    def test_demand_excludes_unknown_models(self) -> None:
        assert holding(queued("r", model="")).demands(NOW_MS) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(INTAKE_CLASSES),
            st.sampled_from("ab"),
            st.integers(0, 30),
            st.integers(0, 30) | st.none(),
            st.booleans(),
        )
    ),
    st.data(),
)
def test_any_sequence_of_adds_and_removes(items: list, data: st.DataObject) -> None:
    # Given requests of all kinds, of which some are removed at some time
    everything = [
        queued(
            f"{at}",
            intake,
            model=model,
            not_before_ms=pause if intake == "retry" else 0,
            deadline_ms=deadline,
            suspect=suspect and intake == "retry",
        )
        for at, (intake, model, pause, deadline, suspect) in enumerate(items)
    ]
    backlog = holding(*everything)
    stay = {one.entry: one for one in everything}
    for now in range(0, 31, 5):
        if stay:
            backlog.remove(stay.pop(data.draw(st.sampled_from(list(stay)))))
        backlog.advance(now)

        # I expect each of the others to be where its time puts it, once.
        deadlines = {name: one.deadline_ms for name, one in stay.items()}
        overdue = {name for name, at in deadlines.items() if at is not None and at <= now}
        pausing = {name for name, one in stay.items() if one.not_before_ms > now}
        ready = [one.entry for model in backlog.models for one in backlog.queue(model) or ()]
        assert set(late(backlog)) == overdue
        assert sorted(ready) == sorted(stay.keys() - overdue - pausing)
        assert len(backlog) == len(stay)
        assert sum(one.requests for one in backlog.demands(now)) == len(ready)


def test_a_queued_request_has_all_that_a_refusal_needs() -> None:
    light = queued("r", "low", client="c", reply_to="replies:c", result_ttl_s=9, deadline_ms=7)

    assert refuse(light, Code.QUEUE_FULL, "full") == Refused(
        "r", "c", "replies:c", Code.QUEUE_FULL, "full", 9
    )


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"tokens": [1, 2, 3]}, 3),
        ({"prompt": "x" * 9}, 3),
        ({"prompt": "€"}, 1),
        ({"messages": [{"role": "user", "content": "x"}]}, 8),
    ],
)
def test_tokens_of_a_prompt(fields: dict, tokens: int) -> None:
    request = make_request("r", **fields)
    raw = {b"prompt": (request.prompt or "").encode()}
    if request.messages:
        raw = {b"messages": b'[{"role":"user","content":"x"}]'}

    assert prompt_tokens(request, raw) == tokens

    common = {b"common": b"{}"}  # the prompt may be there, too
    assert prompt_tokens(request, common) == tokens


def test_the_prompt_of_a_chat_has_its_tools_and_documents() -> None:
    messages = [{"role": "user", "content": "x"}]
    chat = ChatOptions(
        tools=[{"a": "x" * 40}], documents=[{"b": "y" * 40}], chat_template_kwargs={"c": "z" * 40}
    )
    plain, with_more = make_request(messages=messages), make_request(messages=messages, chat=chat)
    more = sum(len(value) for value in chat_fields(chat).values() if isinstance(value, bytes))
    assert more > 120
    size = prompt_tokens(with_more, {}) - prompt_tokens(plain, {})
    assert abs(size - more / 4) <= 1


class TestManyTenants:
    """What is asked in every turn costs no more with many tenants than with one."""

    @given(st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.booleans()), max_size=60))
    def test_the_oldest_of_all_tenants_is_known(self, steps: list[tuple[str, bool]]) -> None:
        backlog = Backlog()
        waiting: dict[str, list[QueuedRequest]] = {"": [], "a": [], "b": [], "c": []}
        for at, (tenant, comes) in enumerate(steps):
            if comes:
                one = queued(f"{at}", since_ms=float(at), tenant=tenant)
                waiting[tenant].append(one)
                backlog.add(one)
            elif waiting[tenant]:
                backlog.remove(waiting[tenant].pop(0), is_served=True)
            queue, left = backlog.queue("m"), [one for each in waiting.values() for one in each]
            assert (queue is None) == (not left)
            if queue is not None:
                assert queue.since_ms == min(one.since_ms for one in left)

    def test_nobody_looks_at_all_of_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tenants = {f"t{number}": float(number) for number in range(500)}
        of_each = [queued(name, since_ms=at, tenant=name) for name, at in tenants.items()]
        backlog = holding(*of_each)
        looks = 0

        def look(queue: PriorityQueue) -> float:
            nonlocal looks
            looks += 1
            return next(iter(queue)).since_ms

        monkeypatch.setattr(PriorityQueue, "clients", property(look))
        monkeypatch.setattr(PriorityQueue, "since_ms", property(look))

        for at, one in enumerate(of_each[:100]):
            backlog.tenants.see(dict.fromkeys(list(tenants)[at : at + 8], 0.0), has_more=True)
            backlog.demands(NOW_MS)
            assert backlog.clients == at + 7  # the largest of what `look` tells of the first
            backlog.remove(one, is_served=True)

        assert looks < 100 * 12


KEYS = st.sampled_from("abcdef").map(lambda name: ("retry", name))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, st.integers(0, 9)),
        st.tuples(st.just("discard"), KEYS, st.none()),
        st.tuples(st.just("due"), st.none(), st.integers(0, 9)),
    )
)


@given(STEPS)
def test_a_delay_queue_returns_due_keys_in_order(steps: list) -> None:
    """Against a plain mapping that is searched."""
    delay_queue, model = DelayQueue(), {}
    for step, key, at in steps:
        if step == "set":
            delay_queue.set(key, at)
            model[key] = at
        elif step == "discard":
            delay_queue.discard(key)
            model.pop(key, None)
        else:
            due = sorted((when, key) for key, when in model.items() if when <= at)
            assert list(delay_queue.take_due(at)) == [key for _, key in due]
            for _, gone in due:
                del model[gone]
        assert delay_queue.next_ms == min(model.values(), default=None)


def test_discarded_keys_do_not_pile_up() -> None:
    delay_queue: DelayQueue[tuple[str, str]] = DelayQueue()
    delay_queue.set(("normal", "stays"), 9e15)

    for number in range(10_000):
        delay_queue.set(("normal", str(number)), 9e14)
        delay_queue.discard(("normal", str(number)))

    assert len(delay_queue._heap) <= 2 + MOST_STALE
    assert delay_queue.next_ms == 9e15


def entry(at: int) -> str:
    return f"{at // 3 + 8}-{at % 3}"  # orders otherwise as text than as a place


def audit(held: list[int], waiting: set[int]) -> list[str]:
    """The entries found gone, page by page as the intake does it."""
    auditing = BacklogReconciler([entry(at) for at in held])
    gone: list[str] = []
    ids = [entry(at) for at in sorted(waiting)]
    for _ in range(len(held) + len(waiting) + 1):
        if auditing.is_over:
            return gone
        after = auditing.after
        first = 0 if after == "-" else ids.index(after.removeprefix("(")) + 1
        until = [one for one in ids if position(one) <= position(auditing.last)]
        gone += auditing.compare(until[first : first + 3])
    pytest.fail("it does not end")


class TestAudit:
    """The backlog is compared with what waits, page by page."""

    @pytest.fixture(autouse=True)
    def small_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coordinator.dispatch.intake, "PAGE", 3)

    @given(st.lists(st.integers(0, 30), unique=True), st.sets(st.integers(0, 30)))
    def test_an_audit_finds_entries_that_do_not_wait(
        self, held: list[int], waiting: set[int]
    ) -> None:
        """In whatever order they are held, since some may have been read again."""
        assert audit(held, waiting) == [entry(at) for at in sorted(set(held) - waiting)]
