"""When something is due: against a plain mapping that is searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.dispatch.backlog import MOST_STALE, DelayQueue

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
