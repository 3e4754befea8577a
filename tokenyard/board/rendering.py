"""Templates to HTML: the environment of Jinja2, and the filters for what the yard's values mean."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any, Final

import jinja2
from markupsafe import Markup

from tokenyard.board.page import request_address
from tokenyard.ops.names import request_name
from tokenyard.protocol.texts import byte_size, counted, cut, harmless, printable, span

#: Blocks of a template that an open page gets again when they change.
LIVE: Final = "live_"
_LAST_MS: Final = 253_402_300_800_000  # the year 10000
_HEADING: Final = re.compile(r'<th scope="col"[^>]*>(.*?)</th>', re.DOTALL)
_ROW_OR_CELL: Final = re.compile("<t([rdh])(?=[ >])[^>]*")


class Templates:
    """The templates of the board; everything that they show is escaped."""

    def __init__(self) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("tokenyard.board"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "span": span,
            "at": utc,
            "line": lambda text: printable(str(text)),
            "lines": lambda text: harmless(str(text)),
            "count": lambda number: f"{number:,}",
            "size": byte_size,
            "cut": lambda text, most: cut(str(text), most),
            "labelled": labelled,
        }
        self._environment.globals |= {
            "counted": counted,
            "request_address": request_address,
            "request_name": request_name,
        }

    def page(self, name: str, context: Mapping[str, Any]) -> str:
        """A whole page."""
        return self._environment.get_template(name).render(context)

    def live_blocks(self, name: str, context: Mapping[str, Any]) -> dict[str, str]:
        """Its live blocks by name, with the macros of ``base.html``, which is not rendered."""
        macros = self._environment.get_template("macros.html")
        context = {**context, "ui": macros.make_module(dict(context))}
        template = self._environment.get_template(name)
        blocks = [block for block in template.blocks if block.startswith(LIVE)]
        return {
            block: "".join(template.blocks[block](template.new_context(dict(context))))
            for block in blocks
        }


def labelled(table: Markup) -> Markup:
    """The inner HTML of a table whose cells name their columns, for screens with no room for them.

    What comes from the yard is escaped, so no value looks like a row or a cell.
    """
    head, begin, body = table.partition("<tbody")
    names = [head[one.start(1) : one.end(1)].striptags() for one in _HEADING.finditer(head)]
    parts, at, left = [head, begin], 0, iter(names)
    for found in _ROW_OR_CELL.finditer(body):
        if found[1] == "r":
            left = iter(names)
            continue
        label = Markup(' data-label="{}"').format(next(left, ""))
        parts += body[at : found.end()], label
        at = found.end()
    return Markup("").join([*parts, body[at:]])


def utc(unix_ms: float) -> str:
    """A time in UTC: ``2026-11-23 06:15:06Z``; of one that cannot be written, its number."""
    if not 0 <= unix_ms < _LAST_MS:
        return f"{unix_ms:.0f} ms"
    at = datetime.datetime.fromtimestamp(unix_ms / 1000, datetime.UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}Z"
