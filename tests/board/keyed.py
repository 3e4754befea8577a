"""A board that asks for keys, with one key of each role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, get_args

from tests.board.asking import Answer, Asking, opened
from tests.support.api_keys import create_key
from tokenyard.protocol.api_keys import Role
from tokenyard.protocol.keys import Yard

ROLES: Final[tuple[Role, ...]] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Keyed:
    """The board of a yard, and a key of each role."""

    ask: Asking
    secrets: dict[Role, str]
    ids: dict[Role, str]
    yard: Yard

    def log_in(self, role: Role, **headers: str) -> str:
        """A cookie of a new session."""
        answer = self.log_in_with(self.secrets[role], **headers)
        assert answer.status == 303, answer
        return answer.cookie

    def log_in_with(self, key: str, back: str = "", **headers: Any) -> Answer:
        return self.ask("/board/login", "POST", form={"key": key, "back": back}, **headers)


@contextmanager
def keyed(url: str, yard: Yard, **options: Any) -> Iterator[Keyed]:
    """A board with keys of all roles."""
    made = {role: create_key(yard, role=role, name=f"of {role}") for role in ROLES}
    with opened(url, yard.keys.yard, needs_keys=True, **options) as ask:
        yield Keyed(
            ask,
            {role: key for role, (key, _) in made.items()},
            {role: key_id for role, (_, key_id) in made.items()},
            yard,
        )
