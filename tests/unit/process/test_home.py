"""Programs whose user has no name and no home, or a home that cannot be written to."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest

from tokenyard.cli.shared.operating import operator
from tokenyard.cli.up import _existing
from tokenyard.cli.up.progress import Announcer
from tokenyard.process import home
from tokenyard.process.home import cache_environment, user_name
from tokenyard.process.running import default_data_dir, running_up, running_url
from tokenyard.process.servers import choose_server
from tokenyard.protocol.errors import SettingsError

VARIABLES = ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_DATA_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A uid without a name, as a container may have."""

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_uid_without_a_name_is_its_number() -> None:
    assert user_name() == f"uid-{os.getuid()}"
    assert operator().startswith(f"uid-{os.getuid()}@")


def test_up_runs_in_a_folder_that_is_given(tmp_path: Path) -> None:
    announcer = Announcer(tmp_path / "data", "main")
    announcer.claim()
    assert "commands without a URL will not find it" in announcer.publish("redis://h")
    assert running_up(tmp_path / "data")
    announcer.withdraw()


def test_without_a_folder_up_asks_for_one() -> None:
    with pytest.raises(SettingsError, match="give --data-dir"):
        default_data_dir("main")
    assert running_url("main") == ""


def test_a_path_below_an_unknown_home_does_not_exist() -> None:
    with pytest.raises(click.UsageError, match="there is no model folder ~/model"):
        _existing("~/model")
    with pytest.raises(SettingsError, match="no executable program there"):
        choose_server("~/valkey-server")


def test_without_a_home_caches_are_temporary(tmp_path: Path) -> None:
    folder = tmp_path / f"tokenyard-home-{os.geteuid()}"
    assert cache_environment() == {"HOME": str(folder)}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_with_a_home_that_is_read_only_what_is_compiled_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # not even root can write below it
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    found = cache_environment()
    assert set(found) == {"VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR"}
    assert all(one.startswith(f"{tmp_path}/tokenyard-home-") for one in found.values())


def test_caches_stay_in_a_home_that_can_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_environment() == {}


def test_no_code_is_run_from_the_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"tokenyard-home-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert cache_environment() == {}
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert cache_environment() == {}
    assert home.expanded("~/x") == Path("~/x")
