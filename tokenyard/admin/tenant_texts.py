"""Settings of tenants in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeVar

from tokenyard.protocol.tenants import DEFAULTS, TenantSettings
from tokenyard.protocol.texts import printable

Word = TypeVar("Word", bound=str)
#: How no restriction of models or classes is shown, and may be given.
ALL: Final = "all"


def restriction(words: Sequence[Word]) -> list[Word] | None:
    """The models or classes of a list that an operator gave; None: it restricts nothing."""
    return list(words) if words and list(words) != [ALL] else None


def words_of(settings: TenantSettings | None) -> str:
    """Settings in one line: ``weight 2, tokens_per_day 1,000``."""
    return "none" if settings is None else ", ".join(_items(settings))


def differences(before: TenantSettings | None, after: TenantSettings | None) -> str:
    """What a change does, in one line."""
    if before is None or after is None:
        return words_of(after)
    return ", ".join(
        f"{name} {value_text(name, old)} -> {value_text(name, new)}"
        for name, old, new in _pairs(before, after)
        if old != new
    )


def value_text(name: str, value: object) -> str:
    """The value of a setting for people."""
    if value is None:
        return ALL
    if isinstance(value, list):
        return printable("+".join(map(str, value)))
    if name == "weight":
        return f"{value:g}"
    return f"{value:,}" if value else "no limit"


def failures_text(failures: Mapping[str, int]) -> str:
    """Failed requests by code, the most frequent first: ``3 WORKER_LOST, 1 POISONED``."""
    listed = sorted(failures.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{count:,} {code}" for code, count in listed)


def _items(settings: TenantSettings) -> Iterator[str]:
    yield f"weight {settings.weight:g}"
    for name, value, default in _pairs(settings, DEFAULTS):
        if name != "weight" and value != default:
            yield f"{name} {value_text(name, value)}"


def _pairs(one: TenantSettings, other: TenantSettings) -> Iterator[tuple[str, object, object]]:
    for name in TenantSettings.__struct_fields__:
        yield name, getattr(one, name), getattr(other, name)


def as_fields(settings: TenantSettings | None) -> dict[str, object] | None:
    """Settings with their defaults, for JSON."""
    if settings is None:
        return None
    return {name: getattr(settings, name) for name in TenantSettings.__struct_fields__}
