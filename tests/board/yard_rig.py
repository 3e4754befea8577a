"""A board before a yard that the test plays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
from starlette.testclient import TestClient

from tests.support.builders import random_name, worker_json
from tests.support.yard import LONG_MS, Yard
from tokenyard.admin.audit import AuditEntry, read_audit
from tokenyard.board.app import Board
from tokenyard.board.settings import BoardOptions
from tokenyard.protocol.control import RunState
from tokenyard.protocol.keys import Keys
from tokenyard.scripts import Scripts

HERE = "http://localhost"


class Look:
    """A browser without a script, before the board of one yard."""

    def __init__(self, yard: Yard, url: str) -> None:
        self.yard, self.url = yard, url
        self._looks = 0
        self.board = Board(BoardOptions(needs_keys=False), url, yard.keys.yard)
        self._client = TestClient(self.board.app, base_url=HERE, follow_redirects=False)

    def close(self) -> None:
        """Close the connections of the board."""
        self._client.close()
        self.board.close()

    def at(self, path: str, status: int = 200) -> str:
        """The page at a path below the board."""
        # A board reads an address once a second for all who look.
        self._looks += 1
        mark = "&" if "?" in path else "?"
        answer = self._client.get(f"/board{path}{mark}look={self._looks}")
        assert answer.status_code == status, answer.text
        return answer.text

    def preview(self, action: str, status: int = 200, **fields: str) -> str:
        """The page that asks whether to do it."""
        answer = self._client.get(f"/board/do/{action}", params=fields)
        assert answer.status_code == status, answer.text
        return answer.text

    def do(self, action: str, **fields: str) -> httpx.Response:
        """Do it."""
        return self._client.post(f"/board/do/{action}", data=fields, headers={"origin": HERE})

    def live(self, path: str, name: str) -> str:
        """A live block of a page, as an open page gets it."""
        page = self.at(path)
        begin = re.search(rf'<(\w+)[^>]* id="{name}"[^>]*>|<(\w+) id="{name}"[^>]*>', page)
        assert begin, name
        tag, depth = begin[1] or begin[2], 1
        for one in re.finditer(rf"<(/?){tag}\b", page[begin.end() :]):
            depth += -1 if one[1] else 1
            if not depth:
                return page[begin.end() :][: one.start()]
        raise AssertionError(f"{name} does not end")

    @property
    def audit(self) -> AuditEntry:
        """The newest entry."""
        [entry] = read_audit(self.yard.connection, self.yard.keys, 1)
        return entry


def text_of(html: str) -> str:
    """What a reader sees, without markup and with one space between words."""
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


@contextmanager
def looking(url: str, connection: Any) -> Iterator[Look]:
    """A board before an empty yard with a leader."""
    keys = Keys(random_name("yard"))
    look = Look(Yard(connection, keys, Scripts(connection, keys)), url)
    try:
        yield look
    finally:
        look.close()


def worker(look: Look, name: str = "w", model: str = "sim", **info: Any) -> str:
    """A worker that is ready, with its incarnation."""
    scripts = look.yard.scripts
    return scripts.register(name, LONG_MS, worker_json(name, model=model, **info))


def obey(
    look: Look, worker_name: str, run_state: RunState = "RUNNING", model: str = "sim", **info: Any
) -> None:
    """Let a worker follow the last change."""
    changed = look.yard.connection.hget(look.yard.keys.desired, "changed") or b"0-0"
    values: Mapping[str, Any] = {"run_state": run_state, "obeyed": changed.decode(), **info}
    packed = worker_json(worker_name.rpartition(".")[0], model=model, **values)
    look.yard.scripts.renew(LONG_MS, [(worker_name, packed)])
