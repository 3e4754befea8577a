"""The units of `deploy/systemd`, as systemd verifies them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.launches import from_systemd
from tests.support.absence import lacks
from tests.support.brokers import DEPLOY

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_no_fault_in_the_units(unit: Path, tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        reason = "systemd-analyze is not installed, so the units were not verified"
        lacks(reason)
    # Given a unit with this machine's program paths and an existing user
    text = unit.read_text().replace("/opt/tokenyard/deploy", str(DEPLOY))
    text = text.replace("/opt/tokenyard/bin", str(Path(sys.executable).parent))
    text = text.replace("User=tokenyard", "User=root")
    copied = tmp_path / unit.name
    copied.write_text(text)

    # I expect systemd to print nothing.
    done = subprocess.run(
        [verify, "verify", "--man=no", copied], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_units_restart_killed_programs_and_signal_the_main_process() -> None:
    # Programs with children signal them; systemd starts a killed program again.
    for launch in from_systemd():
        settings = launch.more
        is_told = launch.name in {"coordinator", "worker"}
        assert settings["Restart"] == ["on-failure" if launch.name == "worker" else "always"]
        assert settings["Type"] == ["notify" if is_told else "exec"]
        assert ("WatchdogSec" in settings) is is_told
        if launch.name in {"worker", "batch"}:
            assert settings["KillMode"] == ["mixed"]
        assert len(settings["EnvironmentFile"]) == 1
