"""Tenants: who waits, the share each should have and has had; one with its usage; keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup

from tokenyard.board.charts import number, tick
from tokenyard.board.page import NotFound, NumberedPage, Parameters, asked_page, numbered_page
from tokenyard.ops.keys import list_keys
from tokenyard.protocol.api_keys import ApiKey
from tokenyard.protocol.keys import Yard, is_tenant
from tokenyard.protocol.streams import unix_ms
from tokenyard.protocol.tenants import KEPT_DAYS
from tokenyard.yard.history import RecentSamples
from tokenyard.yard.line import TenantLine, next_turn, read_line, shares_between, tenant_turn
from tokenyard.yard.tenants import (
    TenantNames,
    TenantView,
    failures_text,
    limits_used,
    list_tenants,
    read_held,
    read_tenants,
    read_windows,
    search_tenants,
    value_text,
)
from tokenyard.yard.usage import TenantUsage, read_report

#: Tenants on one page.
PER_PAGE: Final = 50
#: Of more keys in the yard, those of a tenant are only on the page of keys.
_MOST_KEYS: Final = 2_000
#: Keys on one page.
_KEYS_PER_PAGE: Final = 100
_USAGE_DAYS: Final = (1, 7, 31, KEPT_DAYS)


def view_tenants(yard: Yard, given: Parameters) -> dict[str, Any]:
    """Those in line, all, or those whose names have a text."""
    text = given.text("q")
    line, had = _line(yard)
    shown = given.one_of("show", ("waiting", "all"), "waiting" if line.tenants else "all")
    if text:
        found = search_tenants(yard, text)
        page = numbered_page(given, len(found.names), PER_PAGE, "/tenants", q=text)
        shown, names = "found", found.names[page.first : page.end]
    elif shown == "all":
        found, page = _all(yard, given)
        names = found.names
    else:
        in_line = [one.name for one in line.tenants]
        found = TenantNames(in_line, len(in_line), line.is_whole)
        page = numbered_page(given, len(in_line), PER_PAGE, "/tenants", show=shown)
        names = in_line[page.first : page.end]
    return {
        "text": text,
        "shown": shown,
        "found": found,
        "numbered": page,
        "rows": _rows(yard, names, line, had),
        "in_line": len(line.tenants),
        "is_line_whole": line.is_whole,
        "waiting": line.waiting,
        "next_turn": next_turn(line),
    }


def _all(yard: Yard, given: Parameters) -> tuple[TenantNames, NumberedPage]:
    """A page of all tenants; of fewer than the page asks for, the last page."""
    first = (asked_page(given) - 1) * PER_PAGE
    while True:
        found = list_tenants(yard, first, PER_PAGE)
        page = numbered_page(given, found.total, PER_PAGE, "/tenants", show="all")
        if page.first >= first:
            return found, page
        first = page.first


#: What was seen of each yard's line.
_SAMPLES: Final = RecentSamples[TenantLine](span_ms=60_000, apart_ms=5_000)


def _line(yard: Yard) -> tuple[TenantLine, Mapping[str, float]]:
    """The line, and what share of the tokens each has had lately, as far as somebody looked."""
    line = read_line(yard)
    now_ms = unix_ms(yard.connection.time())
    before = _SAMPLES.add((yard.url, yard.keys.yard), now_ms, line)
    return line, shares_between(before[1], line) if before else {}


def _rows(
    yard: Yard, names: Sequence[str], line: TenantLine, had: Mapping[str, float]
) -> list[dict[str, Any]]:
    """A row for each tenant. Without a name it is all requests of no tenant."""
    tenants = list(filter(None, names))
    views = {one.name: one for one in read_tenants(yard, tenants)}
    windows = dict(zip(tenants, read_windows(yard, tenants), strict=True))
    wanted = line.wanted
    return [
        {
            "view": views.get(name) or TenantView(name=""),
            "wanted": wanted.get(name),  # shares
            "had": had.get(name),
            "limits": limits_used(views[name], windows[name]) if name else {},
        }
        for name in names
    ]


def view_tenant(yard: Yard, given: Parameters) -> dict[str, Any]:
    """One tenant."""
    name, days = given.text("name"), given.whole("days", 7, 1, KEPT_DAYS)
    keys = _keys_of(yard, name) if is_tenant(name) else {}
    if not is_tenant(name) or not (keys or _is_known(yard, name)):
        raise NotFound(f"There is no tenant {name[:200]!r}: nobody has set it, and none has asked.")
    line, had = _line(yard)
    [row] = _rows(yard, [name], line, had)
    view: TenantView = row["view"]
    held, one = read_held(yard, name), line.of(name)
    report = read_report(yard, name, days)
    return {
        "row": row,
        "view": view,
        "classes": ", ".join(f"{count:,} {key}" for key, count in held.items() if count),
        "why": tenant_turn(line, one) if one else "",
        "settings": [
            (key, value_text(key, getattr(view.settings, key)))
            for key in view.settings.__struct_fields__
        ],
        "limits": row["limits"],
        "days": days,
        "choices": _USAGE_DAYS,
        "report": report,
        "bars": day_bars(report.days),
        "failures": failures_text,
        "keys": keys,
    }


def _is_known(yard: Yard, name: str) -> bool:
    pipeline: Any = yard.connection.pipeline(transaction=False)
    pipeline.hget(yard.keys.tenants, name)
    pipeline.zscore(yard.keys.service, name)
    pipeline.hlen(yard.keys.tenant(name))
    packed, service, counts = pipeline.execute()
    return packed is not None or service is not None or counts > 0


def _keys_of(yard: Yard, name: str) -> dict[str, ApiKey] | None:
    """The keys of a tenant; None where there are too many in the yard to look through."""
    count: Any = yard.connection.hlen(yard.keys.api_keys)
    if count > _MOST_KEYS:
        return None
    found = list_keys(yard)
    return {key_id: key for key_id, key in found.items() if key.tenant == name}


# Tokens of each day as bars: inline SVG, styled by classes alone.

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


def view_keys(yard: Yard, given: Parameters) -> dict[str, Any]:
    """All keys, or those of a tenant."""
    tenant = given.text("tenant")
    everything = list_keys(yard)
    found = [one for one in everything.items() if tenant in {"", one[1].tenant}]
    found.reverse()  # the newest first
    page = numbered_page(given, len(found), _KEYS_PER_PAGE, "/keys", tenant=tenant)
    return {
        "tenant": tenant,
        "found": found[page.first : page.end],
        "total": len(found),
        "numbered": page,
    }
