"""Small charts of the last hour as inline SVG, styled by classes alone.

Their size never changes, and both colours and dashes tell lines apart. A description says in words
what they show, for readers who cannot see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

Values = Sequence[float | None]
#: The drawing, and in it the place of the lines.
WIDTH, HEIGHT = 360, 132
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 354, 8, 112
_LOOKS: Final = ("first", "second", "third")


#: One line: its name and values; None is a gap, where nothing is known.
Line = tuple[str, Values]


@dataclass(frozen=True, slots=True)
class Unit:
    """How values are written."""

    text: Callable[[float], str]
    least: float  # the axis reaches at least to here
    steps: Sequence[float] = (1.0, 2.0, 5.0, 10.0)  # its ends, times a power of ten


def duration(seconds: float) -> str:
    """``250 ms``, ``1.5 s``, ``12 s``, ``4 min``, ``3 h``."""
    if seconds < 1:
        return f"{_short(1000 * seconds)} ms"
    if seconds < 120:
        return f"{_short(seconds)} s"
    if seconds < 7200:
        return f"{_short(seconds / 60)} min"
    return f"{_short(seconds / 3600)} h"


def number(value: float) -> str:
    """``0.25``, ``12``, ``1.2 k``, ``3 M``."""
    for size, mark in ((1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{_short(value / size)}{mark}"
    return _short(value)


DURATION: Final = Unit(duration, 0.01)
RATE: Final = Unit(lambda value: f"{number(value)}/s", 1.0)
#: Half of the axis is a whole number, too.
COUNT: Final = Unit(number, 2.0, (1.0, 2.0, 4.0, 10.0))


def _short(value: float) -> str:
    """Two or three digits that matter."""
    if value >= 10 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def chart(name: str, title: str, lines: Sequence[Line], unit: Unit, minutes: int) -> Markup:
    """A figure with its title, the newest values, and the drawing; ``name`` is its id."""
    known = [value for _, values in lines for value in values if value is not None]
    top = _end(max([*known, unit.least]), unit)
    parts = [
        Markup('<figure class="chart"><figcaption><strong>{}</strong> {}</figcaption>').format(
            title, Markup(" ").join(_keys(lines, unit))
        ),
        Markup(
            '<svg viewBox="0 0 {} {}" role="img" aria-labelledby="{}-title {}-text">'
            '<title id="{}-title">{}</title><desc id="{}-text">{}</desc>'
        ).format(WIDTH, HEIGHT, name, name, name, title, name, _described(lines, unit, minutes)),
        *_axes(top, unit, minutes),
        *(_drawn(values, look, top) for (_, values), look in zip(lines, _LOOKS, strict=False)),
    ]
    if not known:
        parts.append(tick((_LEFT + _RIGHT) // 2, 64, "middle", "nothing in this time"))
    return Markup("").join([*parts, Markup("</svg></figure>")])


def _keys(lines: Sequence[Line], unit: Unit) -> Iterator[Markup]:
    """The newest value of each line; with several, by which line it is."""
    for (name, values), look in zip(lines, _LOOKS, strict=False):
        last = values[-1] if values else None
        text = "-" if last is None else unit.text(last)
        yield Markup('<span class="key {}">{} <b>{}</b></span>').format(look, name, text)


def _described(lines: Sequence[Line], unit: Unit, minutes: int) -> str:
    """What the lines show, in words."""
    told = []
    for name, values in lines:
        known = [value for value in values if value is not None]
        if not known:
            told.append(f"{name}: nothing known")
            continue
        low, high, last = unit.text(min(known)), unit.text(max(known)), unit.text(known[-1])
        told.append(f"{name}: from {low} to {high}, last {last}")
    return f"The last {minutes} minutes. {'; '.join(told)}."


def _axes(top: float, unit: Unit, minutes: int) -> Iterator[Markup]:
    for share in (0.0, 0.5, 1.0):
        y = _y(share * top, top)
        yield Markup('<path class="grid" d="M{} {}H{}"/>').format(_LEFT, y, _RIGHT)
        yield tick(_LEFT - 5, y + 4, "end", unit.text(share * top) if share else "0")
    yield tick(_LEFT, HEIGHT - 5, "start", f"{minutes} min ago")
    yield tick(_RIGHT, HEIGHT - 5, "end", "now")


def tick(x: float, y: float, anchor: str, text: str) -> Markup:
    """A short text beside an axis."""
    return Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>').format(
        x, y, anchor, text
    )


def _drawn(values: Values, look: str, top: float) -> Markup:
    path = " ".join(_path(values, top))
    return Markup('<path class="line {}" d="{}"/>').format(look, path) if path else Markup("")


def _path(values: Values, top: float) -> Iterator[str]:
    """The line, broken at gaps; a value alone is a dot."""
    is_down = False
    for at, value in enumerate(values):
        if value is None:
            is_down = False
            continue
        x = _LEFT + (_RIGHT - _LEFT) * at / max(1, len(values) - 1)
        yield f"{'L' if is_down else 'M'}{x:.1f} {_y(value, top)}"
        is_alone = not is_down and (at + 1 == len(values) or values[at + 1] is None)
        if is_alone:
            yield "h0.1"
        is_down = True


def _y(value: float, top: float) -> float:
    return round(_BOTTOM - (_BOTTOM - _TOP) * min(1.0, value / top), 1)


def _end(value: float, unit: Unit) -> float:
    """The next number that reads well."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in unit.steps if step * power >= value * (1 - 1e-9))
