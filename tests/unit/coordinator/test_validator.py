"""The judge: which entries are requests that the yard can run."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.dispatch.models import Models
from coordinator.dispatch.validator import RequestValidator, Verdict
from coordinator.history import FRESH, RetryLimits
from tests.support.builders import make_request
from tokenyard.protocol.keys import INTAKE_CLASSES, IntakeClass
from tokenyard.protocol.wire import Refused, Request, SamplingParams, Unanswerable, request_fields

LIMITS = RetryLimits(max_crashes=3, max_crashed_alone=2, max_lost_alone=3, max_faults=3)


def judge_of(*models: str, **adapters: str) -> RequestValidator:
    """One of a yard with these models, and adapters by name with their base models."""
    known = Models()
    known.learn({name: name for name in models} | adapters)
    return RequestValidator(max_request_bytes=1000, limits=LIMITS, models=known)


def judge(
    fields: Mapping[bytes, bytes],
    intake: IntakeClass = "normal",
    models: tuple[str, ...] = ("adder",),
) -> Verdict:
    return judge_of(*models).judge(intake, fields)


def entry(request: Request | None = None, **more: bytes) -> dict[bytes, bytes]:
    fields = request_fields(request or make_request("q1"))
    packed = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }
    return packed | {name.encode(): value for name, value in more.items()}


def test_sound_request() -> None:
    request = make_request("q1", model="adder", stream=True)

    assert judge(entry(request)) == request


def test_without_an_id_nobody_can_be_answered() -> None:
    assert isinstance(judge({b"prompt": b"p"}), Unanswerable)


def test_bad_request_is_refused() -> None:
    verdict = judge({b"id": b"q1", b"prompt": b"p", b"params": b"{"})

    assert isinstance(verdict, Refused)
    assert verdict.code == "INVALID_REQUEST"


def test_too_many_bytes() -> None:
    verdict = judge(entry(make_request("q1", prompt="x" * 1000)))

    assert isinstance(verdict, Refused)
    assert verdict.code == "INVALID_REQUEST"
    assert verdict.message.startswith("request: 10")


def test_a_refusal_goes_where_the_reply_would_have_gone() -> None:
    request = make_request("q1", client="c", reply_to="replies:c", model="divider", result_ttl_s=60)

    verdict = judge(entry(request))

    assert isinstance(verdict, Refused)
    assert (verdict.client, verdict.reply_to, verdict.result_ttl_s) == ("c", "replies:c", 60)


@pytest.mark.parametrize(
    ("asked", "served", "runs"),
    [
        ("", ("adder",), True),
        ("adder", ("adder", "subtractor"), True),
        ("", ("adder", "subtractor"), False),
        ("divider", ("adder",), False),
        ("divider", (), True),  # no worker has joined yet: nobody knows
        ("", (), True),
    ],
)
def test_models(asked: str, served: tuple[str, ...], runs: bool) -> None:
    verdict = judge(entry(make_request("q1", model=asked)), models=served)

    assert isinstance(verdict, Request) is runs
    if isinstance(verdict, Refused):
        assert verdict.code == "MODEL_UNAVAILABLE"
        assert all(name in verdict.message for name in served)


@pytest.mark.parametrize(
    ("history", "code"),
    [
        ({"crashes": b"99", "suspected": b"9"}, None),
        ({"crashed_alone": b"1"}, None),
        ({"crashed_alone": b"2", "reason": b"ended by SIGSEGV"}, "POISONED"),
        ({"lost_alone": b"2"}, None),
        ({"lost_alone": b"3"}, "POISONED"),
        ({"faults": b"2"}, None),
        ({"faults": b"3", "reason": b"out of cheese"}, "INFERENCE_ERROR"),
    ],
)
def test_given_up(history: dict[str, bytes], code: str | None) -> None:
    verdict = judge(entry(**history), "retry")

    assert isinstance(verdict, Refused) is (code is not None)
    if isinstance(verdict, Refused):
        assert (verdict.code, verdict.is_dead) == (code, True)
        assert history.get("reason", b"").decode() in verdict.message


def test_what_a_request_has_grown_by_does_not_count() -> None:
    request = make_request("q1", prompt="x" * 900)

    assert isinstance(judge(entry(request, published=b"\0" * 4000), "retry"), Request)
    assert isinstance(judge(entry(request, published=b"\0" * 4000)), Refused)


@pytest.mark.parametrize("forged", [b"abc", b"-1", b"", b"9" * 5_000, b"\xff"])
def test_forged_history_counts_nothing(forged: bytes) -> None:
    for name in (b"crashes", b"suspected", b"crashed_alone", b"lost_alone", b"faults"):
        assert isinstance(judge({**entry(), name: forged[:900]}, "retry"), Request)


def test_only_retries_have_a_history() -> None:
    fields = entry(crashes=b"99", crashed_alone=b"1", not_before=b"9" * 13)
    judging = judge_of()

    assert isinstance(judge(fields), Request)
    assert judging.history("normal", fields) == FRESH
    assert judging.trial_size(judging.history("normal", fields)) is None
    assert judging.trial_size(judging.history("retry", fields)) == 0


def test_several_choices_are_taken_up_again_where_it_is_known_whose_the_tokens_are() -> None:
    request = make_request("q1", params=SamplingParams(n=2), stream=True)

    assert isinstance(judge(entry(request), "retry"), Request)
    known = entry(request, published=b"\0\0\0\0", choices=b"\1")
    assert isinstance(judge(known, "retry"), Request)
    verdict = judge(entry(request, published=b"\0\0\0\0"), "retry")
    assert isinstance(verdict, Refused)
    assert verdict.code == "WORKER_LOST"


KNOWN = ["id", "client", "tokens", "prompt", "messages", "model", "params", "stream", "v"]
NAMES = st.sampled_from(
    [*KNOWN, "crashes", "faults", "published", "attempt", "deadline", "metadata"]
)


@given(
    st.dictionaries(NAMES.map(str.encode) | st.binary(max_size=8), st.binary(max_size=30)),
    st.sampled_from(INTAKE_CLASSES),
)
def test_it_never_raises(fields: dict[bytes, bytes], intake: IntakeClass) -> None:
    assert isinstance(judge(fields, intake), Request | Refused | Unanswerable)


def test_adapters_are_served_by_their_base_model() -> None:
    judging = judge_of("adder", "subtractor", roman="adder")

    def model_of(name: str) -> str:
        request = make_request(model=name)
        verdict = judging.judge("normal", entry(request))
        return judging.model_of(request) if isinstance(verdict, Request) else verdict.code

    assert (model_of("roman"), model_of("adder")) == ("adder", "adder")
    assert (model_of("subtractor"), model_of("greek")) == ("subtractor", "MODEL_UNAVAILABLE")


def test_a_refusal_names_models_and_adapters() -> None:
    verdict = judge_of("adder", roman="adder").judge("normal", entry(make_request(model="x")))

    assert isinstance(verdict, Refused)
    assert verdict.message == "model: x; served: adder, roman"


def test_the_only_model_is_meant_where_none_is_named() -> None:
    assert judge_of("adder").model_of(make_request()) == "adder"
    assert judge_of("adder", roman="adder").model_of(make_request()) == "adder"
    assert judge_of("adder", "subtractor").model_of(make_request()) == ""
    assert judge_of().model_of(make_request()) == ""
