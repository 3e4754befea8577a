"""How a yard that `up` runs is announced and found, without starting one."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tokenyard import AsyncClient, BrokerUnavailable, Client
from tokenyard.process.running import (
    Announcement,
    default_data_dir,
    find_yard,
    running_up,
    running_url,
)

URL = "redis://:secret@127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TOKENYARD_REDIS_URL", raising=False)
    monkeypatch.delenv("TOKENYARD_YARD", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))


def announced(yard: str = "main", url: str = URL) -> Announcement:
    announcement = Announcement(default_data_dir(yard))
    assert announcement.claim()
    announcement.publish(url, default_data_dir(yard))
    return announcement


def test_up_is_found_while_it_is_announced() -> None:
    assert running_url("main") == ""
    announcement = announced()
    found = running_up(default_data_dir("main"))
    assert (found.url, found.pid) == (URL, os.getpid())
    announcement.withdraw()
    announcement.withdraw()
    assert running_url("main") == ""


def test_only_its_user_may_read_the_announcement(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        announcement = announced()
    finally:
        os.umask(umask)
    for name in ("up.json", "up.lock"):
        mode = (default_data_dir("main") / name).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600, name
    announcement.withdraw()


def test_a_folder_is_for_one(tmp_path: Path) -> None:
    first, second = Announcement(tmp_path), Announcement(tmp_path)
    assert first.claim()
    assert not second.claim()
    first.publish(URL, tmp_path)
    assert not Announcement(tmp_path).claim()
    assert running_up(tmp_path)  # who came later has changed nothing
    first.withdraw()
    assert second.claim()
    second.withdraw()


def test_the_announcement_of_a_killed_up_is_ignored() -> None:
    text = (
        "import sys; from tests.unit.process.test_running import announced; kept = announced();"
        " print('there', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"there\n"
        assert running_url("main") == URL
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert (default_data_dir("main") / "up.json").exists()
    assert running_url("main") == ""
    announced().withdraw()


@pytest.mark.parametrize("text", ["", "{", '{"url": 1}', '"x"'])
def test_a_file_that_makes_no_sense_is_not_found(text: str) -> None:
    announcement = announced()
    (default_data_dir("main") / "up.json").write_text(text)
    assert running_url("main") == ""
    announcement.withdraw()


def test_a_given_url_precedes_the_environment_and_that_a_running_yard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announcement, north = announced(), announced("north", "redis://north")
    assert find_yard(None, None) == (URL, "main")
    assert find_yard(None, "north") == ("redis://north", "north")
    monkeypatch.setenv("TOKENYARD_YARD", "north")
    assert find_yard(None, None) == ("redis://north", "north")
    assert find_yard(None, "main") == (URL, "main")
    monkeypatch.setenv("TOKENYARD_REDIS_URL", "redis://set")
    assert find_yard(None, None) == ("redis://set", "north")
    assert find_yard("redis://given", "south") == ("redis://given", "south")
    # A program that gives its URL is not moved to another yard by what is around it.
    assert find_yard("redis://given", None) == ("redis://given", "main")
    announcement.withdraw()
    north.withdraw()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_where_nothing_says_where_it_names_all_ways(kind: type) -> None:
    with pytest.raises(BrokerUnavailable) as failed:
        kind()
    for way in ("tokenyard up", "TOKENYARD_REDIS_URL", "--redis-url", 'Client("URL")'):
        assert re.search(re.escape(way), str(failed.value)), way
