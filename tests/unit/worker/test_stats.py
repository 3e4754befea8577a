"""How much a worker has published, as its roster entry shows it."""

from __future__ import annotations

import bisect

import pytest

from tests.support.builders import make_assignment, make_request
from tests.support.fake_clock import FakeClock
from tokenyard.protocol.errors import Code
from tokenyard.protocol.replies import Choice
from tokenyard.protocol.wire import pack_tokens
from tokenyard.protocol.worker_info import WorkerTotals
from tokenyard.telemetry.metrics import BUCKETS_S
from worker.engines import Finished, RequestError, TokenDelta
from worker.messages import PublishedCounts
from worker.process.outcomes import Expired, Outcome, Run, delta_reply
from worker.process.stats import MOST_KEPT, WINDOW_S, RunningStats


def finished(*tokens: int) -> Finished:
    return Finished("1-0", [Choice(0, list(tokens), finish_reason="stop")], 3)


def publish(tally: RunningStats, run: Run, *outcomes: Outcome) -> None:
    """Publish as the publisher does."""
    for outcome in outcomes:
        if isinstance(outcome, TokenDelta):
            delta_reply(run, outcome)
        tally.note([(run, outcome)])


def test_tokens_of_a_stream_count_once() -> None:
    tally, run = RunningStats(), Run(make_assignment(), 0.0)

    publish(tally, run, TokenDelta("1-0", 0, [1, 2]), TokenDelta("1-0", 0, [3]))
    assert tally.now() == WorkerTotals(tokens=3)

    publish(tally, run, finished(1, 2, 3, 4))
    assert tally.now() == WorkerTotals(finished=1, tokens=4)


def test_tokens_of_a_whole_answer_count_as_they_are_made() -> None:
    tally, run, lost = RunningStats(), Run(make_assignment(), 0.0), Run(make_assignment(), 0.0)

    tally.note_made([(run, 2), (lost, 5)])
    assert tally.now() == WorkerTotals(tokens=7)
    tally.note_made([(run, 3), (lost, 5)])
    publish(tally, run, finished(1, 2, 3, 4))

    assert tally.now() == WorkerTotals(finished=1, tokens=9)
    assert tally.counts().tokens["", "output"] == 9


def test_inputs_count_by_task_and_media_by_modality() -> None:
    tally = RunningStats()
    name = "media:" + "0" * 64
    parts = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": "?"}]
    chat = make_request(messages=[{"role": "user", "content": parts}])
    sound = make_request(tokens=pack_tokens([1]), media={"audio": [name, name]})
    pooled = make_request(task="embed", inputs=["a", "b", "c"])
    for request in (chat, sound, pooled):
        publish(tally, Run(make_assignment(request), 0.0), finished(1))
    publish(tally, Run(make_assignment(pooled), 0.0), Expired("1-0", None, "running"))

    counts = PublishedCounts()
    for _ in range(2):
        counts.add(tally.counts())
    assert counts.inputs == {("", "generate"): 4, ("", "embed"): 6}
    assert counts.media == {("", "image"): 2, ("", "audio"): 4}


def test_tokens_of_an_earlier_attempt_are_not_counted_again() -> None:
    tally, run = RunningStats(), Run(make_assignment(published=[1, 2]), 0.0)

    publish(tally, run, finished(1, 2, 3))

    assert tally.now() == WorkerTotals(finished=1, tokens=1)


@pytest.mark.parametrize(
    ("end", "tokens"),
    [
        (RequestError("1-0", Code.INVALID_REQUEST, "too long"), 0),
        (Expired("1-0", None, "running"), 0),
        (Expired("1-0", finished(1, 2), "running"), 2),
    ],
)
def test_each_end_counts_as_a_result(end: RequestError | Expired, tokens: int) -> None:
    tally = RunningStats()

    publish(tally, Run(make_assignment(), 0.0), end)

    assert tally.now() == WorkerTotals(finished=1, failed=1, tokens=tokens)


@pytest.mark.parametrize("sid", ["low/1500-0", "low:acme/1500-0"])
def test_results_are_counted_by_class_also_those_of_tenants(sid: str) -> None:
    tally = RunningStats()
    tally.begin("adder")

    publish(tally, Run(make_assignment(sid=sid), 0.0), finished(1))

    assert tally.counts().results == {("adder", "low", "completed"): 1}


def test_times_to_the_first_token_are_counted_by_bucket(fake_clock: FakeClock) -> None:
    fake_clock.advance(1000.0)
    now = fake_clock.monotonic()
    tally = RunningStats(has_readers=False)
    # Given streams whose first token came after 3 ms, 0.3 s and 1000 s
    for took_s in (0.003, 0.3, 1000.0):
        tally.note_first(Run(make_assignment(), now - took_s), now)
    # one whose tokens all came with its result, and a request that does not stream
    at_once = Run(make_assignment(make_request(stream=True)), now)
    publish(tally, at_once, finished(1))
    publish(tally, Run(make_assignment(), now), finished(1))

    # I expect each stream in its bucket,
    counts = tally.now().ttft
    assert (len(counts), sum(counts)) == (len(BUCKETS_S) + 1, 4)
    assert counts[bisect.bisect_left(BUCKETS_S, 0.003)] >= 1
    assert counts[bisect.bisect_left(BUCKETS_S, 0.3)] == counts[-1] == 1
    # and another incarnation to count from zero.
    tally.begin()
    assert tally.now() == WorkerTotals()


def test_the_median_covers_the_last_minute(fake_clock: FakeClock) -> None:
    now = fake_clock.monotonic()
    tally = RunningStats()
    assert tally.now().ttft_ms is None
    for took_s in (0.1, 0.2, 7.0):
        run = Run(make_assignment(entry="100-0", sid="normal/60-0"), now - took_s)
        tally.note_first(run, now)

    # I expect the time in the intake, here 40 ms, to count too
    assert tally.now().ttft_ms == 240.0

    fake_clock.advance(WINDOW_S + 1)
    assert tally.now().ttft_ms is None


def test_memory_is_bounded() -> None:
    tally, run = RunningStats(), Run(make_assignment(), 0.0)
    for _ in range(2 * MOST_KEPT):
        tally.note_first(run, 1.0)

    assert len(tally._firsts) == MOST_KEPT


def test_details_are_kept_only_for_readers() -> None:
    run = Run(make_assignment(), 0.0)
    unread, read = RunningStats(has_readers=False), RunningStats()
    for tally in (unread, read):
        tally.begin("sim")
        publish(tally, run, finished(1, 2))

    assert unread.now() == read.now() == WorkerTotals(finished=1, tokens=2)
    assert not unread.counts().results
    assert read.counts().results == {("sim", "normal", "completed"): 1}
