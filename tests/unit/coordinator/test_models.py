"""The models that a yard knows."""

from __future__ import annotations

from coordinator.handshake import Models


def models(**bases: str) -> Models:
    known = Models()
    known.learn(bases, set(bases.values()))
    return known


def test_absent_models_stay_known() -> None:
    known = models(a="a", roman="a")

    assert known.learn({"b": "b"}, {"b"})
    assert not known.learn({}, ())
    assert known.learn({"a": "a"}, {"a"})
    assert not known.learn({"a": "a"}, {"a"})
    assert known.base_of("roman") == "a"


def test_the_only_model_of_an_earlier_leader_is_that_of_its_successor() -> None:
    known = Models()

    known.recall(["a", "b"], {}, only="b")
    assert (known.only, known.served) == ("b", ["a", "b"])
    known.learn({"a": "a"}, {"a"})
    known.recall(["a", "b"], {}, only="b")
    assert known.only == "a"


def test_only_a_known_model_of_an_earlier_leader_counts() -> None:
    known = Models()

    known.recall(["a"], {}, only="x")

    assert known.only == "a"


def test_an_adapter_may_move() -> None:
    known = models(a="a", b="b", roman="a")

    assert known.learn({"roman": "b"}, {"b"})
    assert known.base_of("roman") == "b"


def test_models_of_an_earlier_leader_are_added() -> None:
    # Given a model that has become an adapter since
    known = models(a="a", x="a")

    known.recall(["a", "x", "y", "z"], {"y": "x"})

    assert known.adapters == {"x": "a", "y": "x"}
    assert known.names == ["a", "x", "y", "z"]
