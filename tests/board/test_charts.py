"""Charts: where lines begin and end, what a reader is told, and what strings cannot do."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from markupsafe import Markup

from tokenyard.board.charts import COUNT, DURATION, RATE, Values, chart, duration, number


def drawn(*lines: Values, unit: object = COUNT) -> Markup:
    named = [(f"l{at}", values) for at, values in enumerate(lines)]
    return chart("it", "A title", named, unit, 60)  # type: ignore[arg-type]


def paths(html: str) -> list[str]:
    return re.findall(r'class="line \w+" d="([^"]*)"', html)


def test_it_is_well_formed_with_title_and_description() -> None:
    html = drawn([1.0, 2.0], [0.5, None])

    figure = ET.fromstring(str(html))
    svg = figure.find("svg")
    assert svg is not None
    ids = {one.get("id") for one in svg.iter() if one.get("id")}
    assert set((svg.get("aria-labelledby") or "").split()) == ids == {"it-title", "it-text"}
    assert svg.get("role") == "img"
    assert svg.findtext("title") == "A title"
    told = svg.findtext("desc") or ""
    assert "l0: from 1 to 2, last 2; l1: from 0.5 to 0.5, last 0.5" in told


def test_nothing_needs_a_style_or_a_script() -> None:
    html = drawn([1.0, 2.0])
    assert not re.search(r"style|onload|<script|javascript", html, re.IGNORECASE)


def test_its_size_never_changes() -> None:
    boxes = {
        re.search(r'viewBox="([^"]*)"', one)[1]  # type: ignore[index]
        for one in (drawn([]), drawn([1.0] * 120), drawn([1e9, None]), drawn([None], [3.0]))
    }
    assert boxes == {"0 0 360 132"}


def test_a_gap_breaks_the_line_and_a_value_alone_is_a_dot() -> None:
    [path] = paths(drawn([1.0, 2.0, None, 2.0, None, 1.0, 1.0]))

    assert [path.count(mark) for mark in "MLh"] == [3, 2, 1]
    assert paths(drawn([None, None])) == []
    assert "nothing in this time" in drawn([None, None])


def test_lines_stay_within_the_axes() -> None:
    [path] = paths(drawn([0.0, 7.0, 10.0, 3.0]))

    places = [tuple(map(float, one.split())) for one in re.findall(r"[ML]([\d.]+ [\d.]+)", path)]
    assert [x for x, _ in places] == pytest.approx([60, 158, 256, 354], abs=0.1)
    assert [y for _, y in places] == pytest.approx([112, 39.2, 8, 80.8])


@pytest.mark.parametrize("unit", [COUNT, RATE, DURATION])
def test_the_numbers_of_an_axis_are_not_cut_off(unit: object) -> None:
    for power in range(-3, 7):
        for value in (1.0, 2.5, 5.0, 9.0):
            for x, text in re.findall(
                r'x="(\d+)" y="[^"]*" text-anchor="end">([^<]*)<',
                drawn([value * 10.0**power], unit=unit),
            ):
                assert len(text) * 0.6 * 12.5 <= int(x), text  # by the size of `.tick`


@pytest.mark.parametrize(
    ("values", "unit", "ticks"),
    [
        ([3.0], COUNT, ["0", "2", "4"]),
        ([50.0], COUNT, ["0", "50", "100"]),
        ([10.0], COUNT, ["0", "5", "10"]),
        ([0.0], COUNT, ["0", "1", "2"]),
        ([101.0], RATE, ["0", "100/s", "200/s"]),
        ([1_500.0], RATE, ["0", "1 k/s", "2 k/s"]),
        ([0.3], DURATION, ["0", "250 ms", "500 ms"]),
        ([240.0], DURATION, ["0", "4.2 min", "8.3 min"]),
    ],
)
def test_axes_have_round_numbers_with_units(values: Values, unit: object, ticks: list[str]) -> None:
    html = drawn(values, unit=unit)
    assert re.findall(r'text-anchor="end">([^<]*)<', html) == [*ticks, "now"]


def test_the_newest_value_stands_beside_the_title() -> None:
    html = drawn([1.0, 2.0], [4.0, None])
    assert re.findall(r'class="key (\w+)">(\w+) <b>([^<]*)', html) == [
        ("first", "l0", "2"),
        ("second", "l1", "-"),
    ]


def test_names_are_text() -> None:
    html = chart("it", "<b>", [("<i>", [1.0])], COUNT, 60)
    assert "<b>1" in html  # the value's own
    assert "<i>" not in html
    assert "&lt;i&gt;" in html


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(0.0042), "4.2 ms"),
        (duration(0.25), "250 ms"),
        (duration(1.25), "1.2 s"),
        (duration(59.6), "60 s"),
        (duration(300), "5 min"),
        (number(0), "0"),
        (number(0.033), "0.033"),
        (number(12.3), "12"),
        (number(12_345), "12 k"),
        (number(1_200_000), "1.2 M"),
    ],
)
def test_values_are_short(text: str, expected: str) -> None:
    assert text == expected
