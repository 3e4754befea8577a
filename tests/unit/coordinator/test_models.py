"""The models that a yard knows."""

from __future__ import annotations

from coordinator.handshake import Models


def models(**bases: str) -> Models:
    known = Models()
    known.learn(bases)
    return known


def test_models_and_adapters_have_names() -> None:
    known = models(b="b", a="a", roman="a")

    assert known.names == ["a", "b", "roman"]
    assert known.adapters == {"roman": "a"}
    assert known.only == ""
    assert [known.base_of(name) for name in ("a", "roman", "b", "c", "")] == ["a", "a", "b", "", ""]


def test_one_model_with_adapters_is_the_only_one() -> None:
    assert models(a="a", roman="a", greek="a").only == "a"
    assert models().only == ""


def test_absent_models_stay_known() -> None:
    known = models(a="a", roman="a")

    assert known.learn({"b": "b"})
    assert not known.learn({})
    assert not known.learn({"a": "a"})
    assert known.base_of("roman") == "a"


def test_an_adapter_may_move() -> None:
    known = models(a="a", b="b", roman="a")

    assert known.learn({"roman": "b"})
    assert known.base_of("roman") == "b"


def test_models_of_an_earlier_leader_are_added() -> None:
    # Given a model that has become an adapter since
    known = models(a="a", x="a")

    known.recall(["a", "x", "y", "z"], {"y": "x"})

    assert known.adapters == {"x": "a", "y": "x"}
    assert known.names == ["a", "x", "y", "z"]
