"""What hosts announce, as the profiles of models."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.announcements import ModelProfile, OwnRules, by_request_name, read_hosts
from gateway.models import warmth
from tokenyard.protocol.worker_info import HostInfo, ModelInfo, ServingInfo, encode_host

RULES = OwnRules()


def host(name: str, *models: ModelInfo) -> dict[bytes, bytes]:
    return {name.encode(): encode_host(HostInfo(name=name, models=list(models)))}


def model(
    name: str = "m", adapters: tuple[str, ...] = (), fault: str = "", **serving: Any
) -> ModelInfo:
    serving = {"path": f"/models/{name}"} | serving
    announced = ServingInfo(**serving)
    return ModelInfo(name=name, adapters=list(adapters), fault=fault, serving=announced)


def profile(rules: OwnRules = RULES, **serving: Any) -> ModelProfile:
    return read_hosts(host("a", model(**serving)), {"a"}, rules).profiles["m"]


def test_a_model_has_the_arguments_of_its_file() -> None:
    found = profile(
        revision="v2",
        max_model_len=64,
        sampling={"temperature": 0.5, "max_tokens": 8, "presence_penalty": 1.0},
        serve_args={"tool_call_parser": "hermes", "max_logprobs": 50},
    )

    assert (found.path, found.fault) == ("/models/m", "")
    assert found.arguments == {
        "tool_call_parser": "hermes",
        "max_logprobs": 50,
        "revision": "v2",
        "max_model_len": 64,
        "override_generation_config": {"temperature": 0.5, "max_new_tokens": 8},
    }
    # What the front end does not fill in is the worker's default.
    assert found.stated == ("temperature", "max_tokens")


@pytest.mark.parametrize(
    ("serve_args", "word"),
    [
        ({"tool_parser_plugin": "/tmp/evil.py"}, "loads code"),
        ({"middleware": ["os.system"]}, "gateway"),
        ({"port": 1}, "gateway"),
        ({"tool_call_parser": ["x"]}, "Expected `str`"),
        ({"trust_remote_code": True}, "not known"),
    ],
)
def test_what_a_gateway_must_not_do_is_a_fault(serve_args: dict[str, Any], word: str) -> None:
    assert word in profile(serve_args=serve_args).fault


def test_sampling_defaults_that_make_no_sense_are_a_fault() -> None:
    assert "temperature" in profile(sampling={"temperature": "hot"}).fault


@pytest.mark.parametrize(
    ("file", "own", "runs"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_code_of_a_model_runs_only_where_both_trust_it(file: bool, own: bool, runs: bool) -> None:
    found = profile(OwnRules(trust_remote_code=own), trust_remote_code=file)

    assert found.arguments.get("trust_remote_code", False) is runs


def test_a_model_may_lie_elsewhere_here() -> None:
    assert profile(OwnRules(paths={"m": "/mnt/m", "x": "/y"})).path == "/mnt/m"


def test_the_first_living_host_counts_and_others_are_complained_of() -> None:
    entries = (
        host("c", model(max_model_len=3))
        | host("a", model(max_model_len=1))
        | host("b", model(max_model_len=2), model("other"))
    )

    announced = read_hosts(entries, {"b", "c"}, RULES)

    assert announced.profiles["m"].arguments["max_model_len"] == 2
    assert set(announced.profiles) == {"m", "other"}
    [complaint] = announced.complaints
    assert "hosts b and c announce 'm'" in complaint


def test_the_order_of_entries_does_not_matter() -> None:
    entries = host("a", model(max_model_len=1)) | host("b", model(max_model_len=2))

    first = read_hosts(entries, (), RULES)
    second = read_hosts(dict(reversed(entries.items())), (), RULES)

    assert first.profiles == second.profiles


def test_entries_that_cannot_be_read_leave_the_others_alone() -> None:
    good = host("good", model())
    bad = {b"x": b"{", b"\xff": b"\xff", b"y": b'{"name":1}', b"z": b"[" * 5000}
    nested = {b"n": b'{"name":"n","models":[{"name":"d","serving":{"path":[1]}}]}'}

    announced = read_hosts(bad | nested | good, {"good"}, RULES)

    assert set(announced.profiles) == {"m"}
    assert len(announced.complaints) == 5


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_names_that_no_request_can_have_are_left_out(name: str) -> None:
    announced = read_hosts(host("a", model(name), model("m", (name, "fine"))), {"a"}, RULES)

    assert set(announced.profiles) == {"m"}
    assert announced.profiles["m"].adapters == ("fine",)


def test_a_host_of_an_older_version_announces_nothing_to_serve() -> None:
    assert not read_hosts(host("a", ModelInfo(name="m")), {"a"}, RULES).profiles


@given(st.dictionaries(st.binary(max_size=5), st.binary(max_size=200), max_size=4))
def test_it_never_raises(entries: dict[bytes, bytes]) -> None:
    assert not read_hosts(entries, (), RULES).profiles


def test_an_adapter_is_served_by_its_model_and_never_hides_one() -> None:
    base = ModelProfile("base", "/b", adapters=("lora", "other"))
    other = ModelProfile("other", "/o", adapters=("lora",))

    found = by_request_name({"base": base, "other": other})

    assert found == {"base": base, "other": other, "lora": base}


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ({"ready", "loading"}, "warm"),
        ({"loading", "asleep"}, "loading"),
        ({"asleep"}, "asleep"),
        ({"failed", "draining"}, "cold"),
        (set(), "cold"),
    ],
)
def test_the_best_state_of_a_worker_counts(states: set[str], told: str) -> None:
    assert warmth(states) == told


def test_a_model_with_a_path_is_known_before_any_host_announces_it() -> None:
    rules = OwnRules(paths={"m": "/here/m"})
    assert read_hosts({}, (), rules).profiles == {"m": ModelProfile("m", "/here/m")}
    announced = read_hosts(host("a", model(max_model_len=5)), (), rules).profiles["m"]
    assert (announced.path, announced.arguments["max_model_len"]) == ("/here/m", 5)


def test_a_path_for_an_adapter_counts_until_its_model_is_announced() -> None:
    rules = OwnRules(paths={"m": "/here/m", "lora": "/here/m"})
    assert read_hosts({}, (), rules).profiles["lora"].path == "/here/m"

    announced = read_hosts(host("a", model(adapters=("lora",))), (), rules).profiles

    assert by_request_name(announced)["lora"].name == "m"


def test_a_host_that_is_gone_tells_only_what_no_other_does() -> None:
    gone = host("a", model(fault="no file"), model("n"), model("o", fault="bad"))
    there = host("b", model(max_model_len=5), model("n", fault="too large"))

    announced = read_hosts(gone | there, {"b"}, RULES)

    assert set(announced.profiles) == {"m", "n", "o"}
    assert announced.profiles["m"].arguments["max_model_len"] == 5
    assert set(announced.load_faults) == {"n", "o"}


@pytest.mark.parametrize(
    ("live", "only"), [({"a"}, "m"), ({"b"}, "n"), ({"a", "b"}, ""), (set(), "")]
)
def test_the_only_model_is_the_only_one_that_is_there(live: set[str], only: str) -> None:
    assert read_hosts(host("a", model()) | host("b", model("n")), live, RULES).only == only


def test_a_model_is_the_only_one_also_without_its_hosts() -> None:
    assert read_hosts(host("a", model(adapters=("lora",))), (), RULES).only == "m"
    assert read_hosts({}, (), OwnRules(paths={"m": "/m"})).only == "m"
