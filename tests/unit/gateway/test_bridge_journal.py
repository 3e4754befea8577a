"""What the next bridge finds in the journal of one that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.bridge import journal
from gateway.bridge.engine_core import Addresses
from gateway.bridge.journal import Journal, has_front
from tests.support.fake_clock import FakeClock
from tokenyard.protocol.errors import SettingsError

_ADDRESSES = Addresses(["tcp://127.0.0.1:1"], ["tcp://127.0.0.1:2"])


def killed(path: Path, folder: Path) -> set[str]:
    """What would be open if the bridge were killed now."""
    copy = folder / "copy.journal"
    copy.write_bytes(path.read_bytes())
    journal = Journal(copy)
    journal.close()
    return journal.open


@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
def test_the_next_bridge_finds_what_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_clock: FakeClock, most_bytes: int
) -> None:
    monkeypatch.setattr(journal, "_MOST_BYTES", most_bytes)
    path = tmp_path / "folder" / "x.journal"
    assert not has_front(path)
    first = Journal(path)
    assert (first.addresses, first.open) == (None, set())
    first.begin(_ADDRESSES)
    names = [f"a\n{number}" for number in range(10)]
    for name in names:
        first.opened(name)
    first.ended([*names[:9], "unknown"])
    assert killed(path, tmp_path) == set(names)  # the front end may not have read the last of them
    fake_clock.advance(1.0)
    first.opened(names[9])
    assert killed(path, tmp_path) == {names[9]}
    first.close()
    assert has_front(path)
    second = Journal(path)
    assert (second.addresses, second.open) == (_ADDRESSES, {names[9]})
    second.begin(None)
    second.close()
    assert not has_front(path)


def test_a_line_that_was_not_written_to_its_end_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    first = Journal(path)
    first.begin(_ADDRESSES)
    first.opened("whole")
    first.opened("half")
    first.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[: len(whole) - cut])
        found = Journal(path)
        assert found.open <= {"whole", "half"}
        assert ("whole" in found.open) == (cut < len(b'+"half"\n+"whole"\n') - 8)
        found.close()


def test_two_bridges_do_not_share_one(tmp_path: Path) -> None:
    first = Journal(tmp_path / "x.journal")
    with pytest.raises(SettingsError, match="another bridge"):
        Journal(tmp_path / "x.journal")
    first.close()
    Journal(tmp_path / "x.journal").close()
