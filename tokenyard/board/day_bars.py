"""Tokens of each day as bars: inline SVG, styled by classes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from markupsafe import Markup

from tokenyard.board.charts import number, tick
from tokenyard.yard.usage import TenantUsage

WIDTH: Final = 720
HEIGHT: Final = 150
_LEFT, _TOP, _BOTTOM = 64, 12, 126


def day_bars(days: Sequence[TenantUsage]) -> Markup:
    """Tokens in and out of each day, one above the other; the days in order."""
    most = max([1, *(day.tokens_in + day.tokens_out for day in days)])
    each = (WIDTH - _LEFT) / max(1, len(days))
    tokens = sum(day.tokens_in + day.tokens_out for day in days)
    told = f"{tokens:,} tokens in {len(days)} days, at most {most:,} on one day"
    return Markup("").join(
        [
            Markup('<svg class="day-bars" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
                WIDTH, HEIGHT, told
            ),
            tick(_LEFT - 6, _TOP + 10, "end", number(most)),
            tick(_LEFT - 6, _BOTTOM, "end", "0"),
            Markup('<path class="grid" d="M{} {}H{}"/>').format(_LEFT, _BOTTOM, WIDTH),
            *_bars(days, most, each),
            tick(_LEFT, HEIGHT - 6, "start", days[0].day if days else ""),
            tick(WIDTH, HEIGHT - 6, "end", days[-1].day if days else ""),
            Markup("</svg>"),
        ]
    )


def _bars(days: Sequence[TenantUsage], most: int, each: float) -> Iterator[Markup]:
    for at, day in enumerate(days):
        x, bottom = _LEFT + at * each + each * 0.1, float(_BOTTOM)
        for way, tokens in (("in", day.tokens_in), ("out", day.tokens_out)):
            height = (_BOTTOM - _TOP) * tokens / most
            bottom -= height
            if tokens:
                yield Markup(
                    '<rect class="tokens-{}" x="{}" y="{}" width="{}" height="{}">'
                    "<title>{}: {} tokens {}</title></rect>"
                ).format(
                    way,
                    f"{x:.1f}",
                    f"{bottom:.1f}",
                    f"{each * 0.8:.1f}",
                    f"{height:.1f}",
                    day.day,
                    f"{tokens:,}",
                    way,
                )
