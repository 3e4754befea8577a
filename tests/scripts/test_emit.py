"""emit.lua: token deltas are published once, in order, and only by the request's holder."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.builders import framed, framed_elsewhere, make_delta, make_request
from tests.support.yard import PlayedYard
from tokenyard.protocol.replies import Reply
from tokenyard.protocol.wire import Assignment, pack_tokens, unpack_tokens
from tokenyard.scripts.answers import Publication, Published

KINDS = [make_request, framed, framed_elsewhere]


def delta(assignment: Assignment, seq: int, tokens: list[int], **fields: object) -> Publication:
    return Publication(assignment, make_delta(assignment.request.id, seq, tokens, **fields))


def ledger_of(yard: PlayedYard, assignment: Assignment) -> str:
    return yard.keys.ledger(assignment.request.client, assignment.request.id)


def tokens_of(replies: list[Reply]) -> list[int]:
    return [token for reply in replies for token in unpack_tokens(reply.tokens)]


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_appear_in_order_and_are_counted(yard: PlayedYard, worker: str, kind) -> None:
    assignment = yard.assign(worker, kind(stream=True))
    first = delta(assignment, 0, [1, 0, 2**31 - 1], text="a\0é", logprobs='[{"1":-0.5}]')
    second = delta(assignment, 3, [256], index=2)

    assert yard.scripts.emit(worker, [first]) == [Published.PUBLISHED]
    assert yard.scripts.emit(worker, [second]) == [Published.PUBLISHED]

    assert yard.replies(assignment.request) == [first.reply, second.reply]
    assert yard.published(assignment.request) == pack_tokens([1, 0, 2**31 - 1, 256])


def test_step_without_deltas_is_empty(yard: PlayedYard) -> None:
    assert yard.scripts.emit(yard.worker(), []) == []


def test_one_step_of_many_destinations_answers_in_the_order_given(
    yard: PlayedYard, worker: str
) -> None:
    """Given flat and framed requests, I expect one frame for each client, and codes in order."""
    ann = [yard.assign(worker, framed(client="ann", stream=True)) for _ in range(3)]
    flat = [yard.assign(worker, make_request(stream=True)) for _ in range(2)]
    bob = yard.assign(worker, framed(client="bob", stream=True))
    step = [
        delta(ann[0], 0, [1]),
        delta(flat[0], 0, [2]),
        delta(bob, 9, [3]),  # earlier tokens are missing
        delta(ann[1], 0, [4]),
        delta(flat[1], 0, [5]),
        delta(ann[0], 1, [6]),
        delta(ann[2], 0, [7]),
    ]

    codes = yard.scripts.emit(worker, step)

    assert codes == [1, 1, Published.STALE, 1, 1, 1, 1]
    assert tokens_of(yard.replies(ann[0].request)) == [1, 4, 6, 7]
    assert yard.connection.xlen(yard.keys.replies("ann")) == 1
    assert [tokens_of(yard.replies(item.request)) for item in flat] == [[2], [5]]
    assert yard.replies(bob.request) == []


def test_repeated_delta_does_not_block_a_new_one_in_its_step(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    yard.scripts.emit(worker, [delta(assignment, 0, [1])])

    codes = yard.scripts.emit(worker, [delta(assignment, 0, [1]), delta(assignment, 1, [2])])

    assert codes == [Published.REPEATED, Published.PUBLISHED]
    assert tokens_of(yard.replies(assignment.request)) == [1, 2]


@pytest.mark.parametrize("seq", [1, 3, 99])
def test_delta_that_would_skip_or_half_repeat_tokens_is_refused(
    yard: PlayedYard, worker: str, assignment: Assignment, seq: int
) -> None:
    yard.scripts.emit(worker, [delta(assignment, 0, [1, 2])])

    assert yard.scripts.emit(worker, [delta(assignment, seq, [8, 9])]) == [Published.STALE]
    assert tokens_of(yard.replies(assignment.request)) == [1, 2]


def test_delta_without_tokens_is_never_published(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    """It would be indistinguishable from its repetition."""

    assert yard.scripts.emit(worker, [delta(assignment, 0, [], text="x")]) == [Published.REPEATED]
    assert yard.replies(assignment.request) == []


def test_expired_lease_is_valid_until_the_rescue(
    yard: PlayedYard, worker: str, assignment: Assignment
) -> None:
    yard.expire(worker)

    assert yard.scripts.emit(worker, [delta(assignment, 0, [1])]) == [Published.PUBLISHED]


def test_the_next_attempt_continues_after_the_last_published_token(yard: PlayedYard) -> None:
    first, second = yard.worker(), yard.worker()
    request = make_request(stream=True)
    assignment = yard.assign(first, request)
    yard.scripts.emit(first, [delta(assignment, 0, [1, 2])])
    yard.lose(first)
    again = yard.place(yard.waiting(request), second)

    assert unpack_tokens(again.published) == [1, 2]
    assert yard.scripts.emit(second, [delta(again, 0, [1])]) == [Published.REPEATED]
    assert yard.scripts.emit(second, [delta(again, 2, [3])]) == [Published.PUBLISHED]
    assert tokens_of(yard.replies(request)) == [1, 2, 3]


def test_epoch_of_the_first_token_is_kept_for_the_next_attempt(yard: PlayedYard) -> None:
    # Given a stream that began in epoch 0, and another of the same step without an epoch
    first, second = yard.worker(), yard.worker()
    request, other = make_request(stream=True), framed(stream=True)
    assignment, beside = yard.assign(first, request), yard.assign(first, other)
    step = [delta(beside, 0, [9]), replace(delta(assignment, 0, [1]), epoch=0)]

    # If the step is repeated after a lost answer, and later attempts have another epoch
    assert yard.scripts.emit(first, step) == [Published.PUBLISHED] * 2
    assert yard.scripts.emit(first, step) == [Published.REPEATED] * 2
    yard.scripts.emit(first, [replace(delta(assignment, 1, [2]), epoch=1)])
    yard.lose(first)
    again = yard.place(yard.waiting(request), second)
    yard.scripts.emit(second, [replace(delta(again, 2, [3]), epoch=2)])

    # I expect the first epoch to stay, also on the lane.
    assert (again.first_epoch, unpack_tokens(again.published)) == (0, [1, 2])
    assert yard.ledger(request)["epoch"] == "0"
    assert "epoch" not in yard.ledger(other)
    assert yard.place(yard.waiting(other), second).first_epoch is None


def test_epoch_of_a_delta_that_is_not_published_is_not_kept(yard: PlayedYard, worker: str) -> None:
    request = make_request(stream=True)
    assignment = yard.assign(worker, request)
    late = msgspec.structs.replace(assignment, attempt=7)

    codes = yard.scripts.emit(worker, [replace(delta(late, 0, [1]), epoch=3)])

    assert codes == [Published.STALE]
    assert "epoch" not in yard.ledger(request)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 31, 32, 63, 64, 255, 256, 65_535, 65_536, 70_000])
def test_every_length_of_text_and_tokens_arrives_whole(
    yard: PlayedYard, worker: str, kind, size: int
) -> None:
    """Given each msgpack encoding of a length, I expect the same bytes back."""
    assignment = yard.assign(worker, kind(stream=True))
    step = delta(assignment, 0, [0, 255, 2**24] * size, text="a\0" + "x" * (size - 2))

    assert yard.scripts.emit(worker, [step]) == [Published.PUBLISHED]
    assert yard.replies(assignment.request) == [step.reply]


@pytest.mark.parametrize("seq", [127, 128, 255, 256, 65_535, 65_536, 100_000, 1_000_000])
def test_count_of_tokens_is_a_plain_decimal(yard: PlayedYard, worker: str, seq: int) -> None:
    request = make_request(stream=True)
    assignment = yard.assign(worker, request)
    yard.scripts.emit(worker, [delta(assignment, 0, [1] * seq)])

    assert yard.scripts.emit(worker, [delta(assignment, seq, [2])]) == [Published.PUBLISHED]

    ((_, fields),) = yard.connection.xrevrange(yard.keys.reply("anon", request.id), count=1)
    assert fields[b"seq"] == str(seq).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_reply_stream_is_bounded(yard: PlayedYard, worker: str, kind) -> None:
    """Given a client that does not read, I expect roughly its oldest entries to be trimmed."""
    yard.scripts._reply_maxlen = 100
    assignment = yard.assign(worker, kind(stream=True))

    for seq in range(500):
        yard.scripts.emit(worker, [delta(assignment, seq, [seq])])

    kept = tokens_of(yard.replies(assignment.request))
    assert 100 <= len(kept) <= 300
    assert kept == list(range(500 - len(kept), 500))
    assert yard.published(assignment.request) == pack_tokens(range(500))


def test_wide_step_is_published_in_one_call(yard: PlayedYard, worker: str) -> None:
    running = [yard.assign(worker, framed(stream=True)) for _ in range(300)]

    codes = yard.scripts.emit(worker, [delta(item, 0, [at]) for at, item in enumerate(running)])

    assert codes == [Published.PUBLISHED] * 300
    assert tokens_of(yard.replies(running[0].request)) == list(range(300))


class TestTrust:
    """A delta whose attempt was compared lately is published without another look."""

    @staticmethod
    def step(assignment: Assignment, seq: int, token: int) -> list[Publication]:
        return [replace(delta(assignment, seq, [token]), is_trusted=True)]

    @pytest.fixture
    def until(self, yard: PlayedYard, worker: str, assignment: Assignment) -> int:
        """The assignment has published a token, and is trusted up to this time."""
        assert yard.emit(worker, assignment, [1]) is Published.PUBLISHED
        return yard.scripts.emitted_ms + 60_000

    def test_the_ledger_is_not_asked_before_the_end_of_trust(
        self, yard: PlayedYard, worker: str, assignment: Assignment, until: int
    ) -> None:
        # Given a ledger that would refuse this attempt, if it were asked
        yard.connection.hset(ledger_of(yard, assignment), "attempt", 7)

        assert yard.scripts.emit(worker, self.step(assignment, 1, 2), until) == [1]
        assert yard.scripts.emit(worker, [delta(assignment, 2, [3])], until) == [0]
        assert yard.scripts.emit(worker, self.step(assignment, 2, 3), 1) == [0]
        assert tokens_of(yard.replies(assignment.request)) == [1, 2]

    @pytest.mark.parametrize("seq", [0, 1])
    def test_of_a_cancelled_request_nothing_is_published(
        self, yard: PlayedYard, worker: str, assignment: Assignment, until: int, seq: int
    ) -> None:
        request = assignment.request
        yard.scripts.cancel(request.client, request.id, "for the test")

        assert yard.scripts.emit(worker, self.step(assignment, seq, 2), until) == [0]
        assert yard.published(request) == b""

    def test_of_a_worker_without_a_lease_nothing_is_published(
        self, yard: PlayedYard, worker: str, assignment: Assignment, until: int
    ) -> None:
        yard.lose(worker)

        assert yard.scripts.emit(worker, self.step(assignment, 1, 2), until) == [-1]
        assert yard.published(assignment.request) == pack_tokens([1])

    def test_where_the_server_has_lost_tokens_nothing_is_published(
        self, yard: PlayedYard, worker: str, assignment: Assignment, until: int
    ) -> None:
        yard.emit(worker, assignment, [2], seq=1)
        request = assignment.request
        yard.connection.set(yard.keys.tokens(request.client, request.id), pack_tokens([1]))

        assert yard.scripts.emit(worker, self.step(assignment, 2, 3), until) == [0]
        assert yard.published(request) == pack_tokens([1])

    def test_a_repeated_call_changes_nothing(
        self, yard: PlayedYard, worker: str, assignment: Assignment, until: int
    ) -> None:
        step = self.step(assignment, 1, 2)

        assert yard.scripts.emit(worker, step, until) == [Published.PUBLISHED]
        assert yard.scripts.emit(worker, step, until) == [Published.REPEATED]
        assert tokens_of(yard.replies(assignment.request)) == [1, 2]
