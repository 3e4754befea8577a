"""Admission: which entries are requests that the yard can run, and when a retry is given up."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.dispatch.admission import Admission, History, Verdict, read_history
from coordinator.dispatch.entries import Entry
from coordinator.handshake import Models
from coordinator.routing.queued_request import QueuedRequest
from tests.support.builders import entry_fields, make_request
from tokenyard.protocol.errors import Code
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.wire import Refused, SamplingParams, Unanswerable
from tokenyard.protocol.worker_info import OutputDefaults

SETTINGS = CoordinatorSettings(redis_url="redis://x", max_request_bytes=1000)
NOW_MS = 1_000_000.0


def admit(
    fields: Mapping[bytes, bytes],
    intake: IntakeClass = "normal",
    models: tuple[str, ...] = ("adder",),
    entry_id: str = "1-0",
    most_bytes: int = 1000,
    **adapters: str,
) -> Verdict:
    """Admit an entry in a yard with these models, and adapters by name with their base models."""
    known = Models()
    known.learn({name: name for name in models} | adapters, models)
    settings = CoordinatorSettings(redis_url="redis://x", max_request_bytes=most_bytes)
    return Admission(settings, known).admit(Entry(intake, entry_id, fields), NOW_MS)


def test_a_valid_request_is_queued() -> None:
    request = make_request("q1", client="c", reply_to="replies:c", deadline_ms=9, result_ttl_s=60)

    queued = admit(entry_fields(request), entry_id="5-0")

    assert (queued.entry, queued.model, queued.since_ms) == ("5-0", "adder", 5.0)
    reply = (queued.id, queued.client, queued.reply_to, queued.result_ttl_s, queued.deadline_ms)
    assert reply == ("q1", "c", "replies:c", 60, 9)


def test_an_entry_of_the_future_came_in_now() -> None:
    queued = admit(entry_fields(make_request("q1")), entry_id="99999999-0")

    assert queued.since_ms == NOW_MS


def test_a_refusal_goes_where_the_reply_would_have_gone() -> None:
    request = make_request("q1", client="c", reply_to="replies:c", model="divider", result_ttl_s=60)

    verdict = admit(entry_fields(request))

    assert (verdict.client, verdict.reply_to, verdict.result_ttl_s) == ("c", "replies:c", 60)


@pytest.mark.parametrize(
    ("asked", "served", "runs"),
    [
        ("", ("adder",), True),
        ("adder", ("adder", "subtractor"), True),
        ("", ("adder", "subtractor"), False),
        ("divider", ("adder",), False),
        ("divider", (), True),  # no worker has joined yet
        ("", (), True),
    ],
)
def test_a_request_for_an_unknown_model_is_refused(
    asked: str, served: tuple[str, ...], runs: bool
) -> None:
    verdict = admit(entry_fields(make_request("q1", model=asked)), models=served)

    assert isinstance(verdict, QueuedRequest) is runs
    if isinstance(verdict, Refused):
        assert verdict.code == "MODEL_UNAVAILABLE"
        assert all(name in verdict.message for name in served)


def test_a_retry_with_too_many_failures_is_given_up() -> None:
    history = {"faults": b"3", "reason": b"out of cheese"}
    verdict = admit(entry_fields(make_request("q1"), **history), "retry")

    assert isinstance(verdict, Refused)
    assert (verdict.code, verdict.is_dead) == ("INFERENCE_ERROR", True)
    assert verdict.message.endswith("out of cheese")


def test_fields_that_the_system_added_do_not_count_as_bytes_of_a_retry() -> None:
    request = make_request("q1", prompt="x" * 900)

    assert isinstance(admit(entry_fields(request, published=b"\0" * 4000), "retry"), QueuedRequest)
    assert isinstance(admit(entry_fields(request, published=b"\0" * 4000)), Refused)


def test_only_retries_have_a_history() -> None:
    past = 9 * 10**12
    fields = entry_fields(
        make_request("q1"),
        crashes=b"99",
        crashed_alone=b"1",
        not_before=b"%d" % past,
        published=b"\0" * 4,
    )

    new, retry = admit(fields), admit(fields, "retry")

    assert (new.trial, new.not_before_ms, new.published) == (None, 0, b"")
    assert new.digest
    assert (retry.trial, retry.not_before_ms, retry.published) == (0, past, b"\0" * 4)
    assert not retry.digest, "the ledger has it"


def test_a_retry_with_several_choices_continues_only_where_the_choice_of_each_token_is_known() -> (
    None
):
    request = make_request("q1", params=SamplingParams(n=2), stream=True)

    assert isinstance(admit(entry_fields(request), "retry"), QueuedRequest)
    known = entry_fields(request, published=b"\0\0\0\0", choices=b"\1")
    assert isinstance(admit(known, "retry"), QueuedRequest)
    verdict = admit(entry_fields(request, published=b"\0\0\0\0"), "retry")
    assert verdict.code == "WORKER_LOST"


KNOWN = ["id", "client", "tokens", "prompt", "messages", "model", "params", "stream", "v"]
NAMES = st.sampled_from(
    [*KNOWN, "crashes", "faults", "published", "attempt", "deadline", "metadata"]
)


@given(
    st.dictionaries(NAMES.map(str.encode) | st.binary(max_size=8), st.binary(max_size=30)),
    st.sampled_from(INTAKE_CLASSES),
)
def test_no_entry_raises(fields: dict[bytes, bytes], intake: IntakeClass) -> None:
    assert isinstance(admit(fields, intake), QueuedRequest | Refused | Unanswerable)


def deepest_json() -> int:
    """Levels that the parser reads: up to Python 3.11 by its own limit, later by that of C code."""
    least, most = 100, 100_000
    while most - least > 1:
        depth = (least + most) // 2
        try:
            msgspec.json.decode(b"[" * depth + b"]" * depth)
        except RecursionError:
            most = depth
        else:
            least = depth
    assert most < 100_000
    return least


@pytest.mark.parametrize("prompt", [b"prompt", b"messages"])
def test_an_entry_that_can_just_be_parsed_does_not_raise(prompt: bytes) -> None:
    """JSON that is nested as deeply as the parser allows is too deep for what comes after it."""
    content = b"x" if prompt == b"prompt" else b'[{"role":"user","content":"x"}]'
    most = deepest_json()
    verdicts = set[type]()
    for depth in range(most - 150, most + 50):
        deep = b"[" * depth + b"]" * depth
        fields = {b"id": b"q", prompt: content, b"params": b'{"extra_args":{"a":%b}}' % deep}
        verdicts.add(type(admit(fields, most_bytes=1 << 20)))
    assert verdicts == {QueuedRequest, Refused}


class TestMostOutput:
    """What a request may generate at most, by which it is charged while it runs."""

    DEFAULTS: ClassVar = {
        "long": OutputDefaults(max_tokens=500),
        "wide": OutputDefaults(n=3),
        "voice": OutputDefaults(max_tokens=500, n=2),
        "short": OutputDefaults(max_tokens=5),
    }

    def most(self, fields: Mapping[bytes, bytes], only: str = "") -> int:
        known = Models()
        bases = {name: name for name in ("adder", "long", "wide", "short")} | {"voice": "long"}
        known.learn(bases, [only] if only else list(bases), self.DEFAULTS)
        admission = Admission(SETTINGS, known)
        queued = admission.admit(Entry("normal", "1-0", fields), NOW_MS)
        assert isinstance(queued, QueuedRequest)
        return queued.max_output

    @pytest.mark.parametrize(
        ("model", "params", "most"),
        [
            ("adder", "{}", 16),
            ("long", "{}", 500),
            ("wide", "{}", 48),
            ("voice", "{}", 1000),  # of an adapter
            ("long", '{"max_tokens":16}', 16),  # it says what is usual
            ("long", '{"max_tokens":7,"n":2}', 14),
            ("wide", '{"n":1}', 16),
            ("wide", '{"max_tokens":10}', 30),
            ("long", '{"max_tokens":null}', sys.maxsize),
            ("wide", '{"max_tokens":null,"n":1}', sys.maxsize),
        ],
    )
    @pytest.mark.parametrize("is_common", [False, True])
    def test_the_models_file_says_what_a_request_does_not(
        self, model: str, params: str, most: int, is_common: bool
    ) -> None:
        more = {"model": model, "params": params}
        fields = {b"id": b"q1", b"prompt": b"p"}
        if is_common:
            fields[b"common"] = msgspec.json.encode(more)
        else:
            fields |= {name.encode(): text.encode() for name, text in more.items()}
        assert self.most(fields) == most

    def test_without_a_model_it_is_the_only_one(self) -> None:
        fields = {b"id": b"q1", b"prompt": b"p"}
        assert self.most(fields, only="long") == 500

    def test_what_does_not_fit_is_left_to_its_worker(self) -> None:
        """Given a bound of the models file below its ``min_tokens``, I expect no error here."""
        fields = {b"id": b"q1", b"prompt": b"p", b"params": b'{"min_tokens":9}'}
        assert self.most(fields, only="short") == 16


LIMITS = CoordinatorSettings(redis_url="redis://x", max_lost_alone=2)


@pytest.mark.parametrize(
    ("history", "trial"),
    [
        (History(), None),
        (History(crashes=2), None),
        (History(crashes=3), 0),
        (History(crashes=1, suspected=1, trial=16), 16),
        (History(crashes=1, suspected=1, trial=0), 0),
        (History(crashes=4, suspected=2, trial=4), 4),
        (History(crashes=5, suspected=2, trial=4), 0),
        (History(crashes=9, suspected=9), None),
        (History(faults=9), None),
    ],
)
def test_the_size_of_a_suspects_next_trial(history: History, trial: int | None) -> None:
    assert history.trial_size(LIMITS) == trial


@pytest.mark.parametrize(
    ("history", "choices", "code"),
    [
        (History(), 1, None),
        (History(crashes=99, suspected=99), 1, None),
        (History(lost_alone=1), 1, None),
        (History(lost_alone=2), 1, Code.POISONED),
        (History(crashed_alone=1), 1, None),
        (History(crashed_alone=2), 1, Code.POISONED),
        (History(faults=2), 1, None),
        (History(faults=3), 1, Code.INFERENCE_ERROR),
        (History(faults=3, crashed_alone=2), 1, Code.POISONED),
        (History(published=9), 1, None),
        (History(published=9, choices=9), 2, None),
        (History(published=9, choices=8), 2, Code.WORKER_LOST),
        (History(published=9), 2, Code.WORKER_LOST),
        (History(crashes=1), 2, None),
    ],
)
def test_when_a_request_is_given_up(history: History, choices: int, code: Code | None) -> None:
    failure = history.failure(LIMITS, choices)

    assert (failure and failure[0]) == code


def test_the_history_is_read_from_the_fields_of_a_retry() -> None:
    fields = {
        b"crashes": b"1",
        b"suspected": b"2",
        b"crashed_alone": b"3",
        b"lost_alone": b"4",
        b"faults": b"5",
        b"not_before": b"1700000000000",
        b"reason": b"\xffwhy",
        b"published": b"\0\0\0\0",
        b"trial": b"16",
        b"choices": b"\0\1",
    }

    known = History(1, 2, 3, 4, 5, 1_700_000_000_000, "\ufffdwhy", published=1, choices=2, trial=16)
    assert read_history(fields) == known


@pytest.mark.parametrize("forged", [b"", b"-1", b"1.5", b"9" * 16, b"\xff", b"one"])
def test_values_that_are_not_numbers_count_as_0(forged: bytes) -> None:
    names = (b"crashes", b"suspected", b"crashed_alone", b"lost_alone", b"faults", b"not_before")

    assert read_history(dict.fromkeys(names, forged)) == History()
