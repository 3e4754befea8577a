"""What a form or a command line gives becomes the values of an operation, or a clear error."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from tokenyard.ops.operation import Caller, Field, Outcome, Parameter, Preview, operation
from tokenyard.protocol.errors import BadInput
from tokenyard.protocol.keys import Yard


def preview(yard: Yard, caller: Caller, **given: Any) -> Preview:
    return Preview("It would be done.")


@operation("test.all", "All kinds", preview)
def all_kinds(
    yard: Yard,
    caller: Caller,
    *,
    name: Annotated[str, Field("Name")],
    path: Annotated[str, Field("Path", may_be_empty=True)],
    mode: Annotated[Literal["a", "b"], Field("Mode")] = "a",
    role: Annotated[Literal["x", "y"] | None, Field("Role")] = None,
    count: Annotated[int, Field("Count", least=1, most=9)] = 2,
    limit: Annotated[int | None, Field("Limit")] = None,
    weight: Annotated[float, Field("Weight", least=0.5, most=2)] = 1.0,
    sure: bool = False,
    words: Annotated[list[str] | None, Field("Words")] = None,
    key: Annotated[tuple[str, ...], Field(noun="key", is_secret=True)] = (),
) -> Outcome:
    """Do it."""
    return Outcome("It is done", "all")


PARAMETERS = {one.name: one for one in all_kinds.parameters}


def test_the_signature_says_what_there_is() -> None:
    kinds = {name: (one.type, one.choices) for name, one in PARAMETERS.items()}
    assert kinds == {
        "name": (str, ()),
        "path": (str, ()),
        "mode": (str, ("a", "b")),
        "role": (str, ("x", "y")),
        "count": (int, ()),
        "limit": (int, ()),
        "weight": (float, ()),
        "sure": (bool, ()),
        "words": (list, ()),
        "key": (tuple, ()),
    }
    assert [name for name, one in PARAMETERS.items() if one.is_required] == ["name", "path"]
    assert PARAMETERS["key"].flag == "--key"


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("name", ["x y"], "x y"),
        ("path", [""], ""),
        ("path", [], ""),
        ("mode", [], "a"),
        ("mode", ["b"], "b"),
        ("role", [""], None),
        ("role", ["y"], "y"),
        ("count", [], 2),
        ("count", ["9"], 9),
        ("limit", [""], None),
        ("limit", ["1,000,000"], 1_000_000),
        ("weight", ["0.5"], 0.5),
        ("sure", ["on"], True),
        ("sure", [], False),
        ("words", ["a, b,,"], ["a", "b"]),
        ("words", [""], None),
        ("key", ["1", "2", "1", ""], ("1", "2")),
        ("key", [], ()),
    ],
)
def test_a_text_is_read_by_its_type(name: str, texts: list[str], value: Any) -> None:
    assert PARAMETERS[name].read(texts) == value


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("name", "", "name: give it"),
        ("mode", "c", "mode: give one of a, b"),
        ("count", "0", "count: give a whole number from 1 to 9, not '0'"),
        ("count", "10", "count: give a whole number from 1 to 9, not '10'"),
        ("count", "1.5", "count: give a whole number from 1 to 9, not '1.5'"),
        ("limit", "-1", "limit: give a whole number of at least 0, not '-1'"),
        ("limit", "9" * 5000, f"limit: give a whole number of at least 0, not '{'9' * 50}'"),
        ("limit", "٣", "limit: give a whole number of at least 0, not '٣'"),
        ("weight", "nan", "weight: give a number from 0.5 to 2, not 'nan'"),
        ("weight", "1.1.1", "weight: give a number from 0.5 to 2, not '1.1.1'"),
        ("weight", "3", "weight: give a number from 0.5 to 2, not '3'"),
    ],
)
def test_a_wrong_text_is_told_with_what_to_give(name: str, text: str, error: str) -> None:
    with pytest.raises(BadInput) as caught:
        PARAMETERS[name].read([text])
    assert (str(caught.value), caught.value.field) == (error, name)


def test_the_audit_has_what_was_given_but_no_secret() -> None:
    values = {"name": "n", "path": "", "limit": None, "words": ["a", "b"], "key": ("secret",)}
    values |= {"mode": "a", "count": 3}
    assert all_kinds.details(values) == {"name": "n", "path": "", "count": "3", "words": "a,b"}
    assert all_kinds.target(values) == ""


def test_an_operator_of_the_board_is_named_as_such() -> None:
    assert Caller("olga", "admin").operator == "olga@board"
    assert Caller("kim@north", "cli").operator == "kim@north"
    assert Caller("kim", "cli").operator == "kim"


def test_a_parameter_without_a_field_is_one_too() -> None:
    assert PARAMETERS["sure"] == Parameter("sure", bool, False, (), Field())
