"""The models that a yard knows, by the names that requests use."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Models:
    """Which base model serves a name: its own, or that of an adapter.

    A model stays known when its workers and hosts are away, so that requests for it can wait.
    """

    def __init__(self) -> None:
        self._bases: dict[str, str] = {}  # by name
        #: The base model where the yard has exactly one; else "".
        self.only = ""

    @property
    def names(self) -> list[str]:
        """All names that requests may use, in order."""
        return sorted(self._bases)

    @property
    def bases(self) -> set[str]:
        """The base models."""
        return set(self._bases.values())

    @property
    def adapters(self) -> dict[str, str]:
        """The base model of each adapter."""
        return {name: base for name, base in sorted(self._bases.items()) if name != base}

    def base_of(self, name: str) -> str:
        """The base model that serves requests for ``name``; "" where nobody knows one.

        A request without a name means the only model of the yard.
        """
        return self._bases.get(name, "") if name else self.only

    def learn(self, bases: Mapping[str, str]) -> bool:
        """Take over what the roster says now, base models by name; whether that is news."""
        before = dict(self._bases)
        self._know(before | dict(bases))
        return self._bases != before

    def recall(self, names: Collection[str], adapters: Mapping[str, str]) -> None:
        """Take over what a leader has published, as far as nothing newer is known."""
        told = {name: adapters.get(name, name) for name in names}
        self._know(told | self._bases)

    def _know(self, bases: dict[str, str]) -> None:
        self._bases = bases
        different = set(bases.values())
        self.only = different.pop() if len(different) == 1 else ""
