"""Admission: which entries are requests that the yard can run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.dispatch.admission import Admission, Verdict
from coordinator.dispatch.entries import Entry
from coordinator.handshake import Models
from coordinator.routing.queued_request import QueuedRequest
from tests.support.builders import entry_fields, make_request
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


def test_a_request_without_an_id_is_unanswerable() -> None:
    assert isinstance(admit({b"prompt": b"p"}), Unanswerable)


def test_a_bad_request_is_refused() -> None:
    verdict = admit({b"id": b"q1", b"prompt": b"p", b"params": b"{"})

    assert verdict.code == "INVALID_REQUEST"


def test_a_request_with_too_many_bytes_is_refused() -> None:
    verdict = admit(entry_fields(make_request("q1", prompt="x" * 1000)))

    assert verdict.code == "INVALID_REQUEST"
    assert verdict.message.startswith("request: 10")


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


def test_requests_for_adapters_wait_for_their_base_model() -> None:
    def model_of(name: str) -> str:
        fields = entry_fields(make_request(model=name))
        verdict = admit(fields, models=("adder", "subtractor"), roman="adder")
        assert not isinstance(verdict, Unanswerable)
        return verdict.code if isinstance(verdict, Refused) else verdict.model

    assert (model_of("roman"), model_of("adder")) == ("adder", "adder")
    assert (model_of("subtractor"), model_of("greek")) == ("subtractor", "MODEL_UNAVAILABLE")


def test_a_refusal_names_models_and_adapters() -> None:
    verdict = admit(entry_fields(make_request(model="x")), roman="adder")

    assert verdict.message == "model: x; served: adder, roman"


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
