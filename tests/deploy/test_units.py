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

BATCHES = DEPLOY / "systemd" / "batches"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.mark.parametrize("batches", [False, True], ids=["", "with-batches"])
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_no_fault_in_the_units(unit: Path, tmp_path: Path, batches: bool) -> None:
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
    if batches:
        shutil.copytree(BATCHES, tmp_path, dirs_exist_ok=True)
        for more in tmp_path.glob("*/*.conf"):
            more.write_text(more.read_text().replace("User=tokenyard", "User=root"))

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
        if launch.name in {"worker", "batch", "bridge"}:
            assert settings["KillMode"] == ["mixed"]
        assert len(settings["EnvironmentFile"]) == 1


def test_with_batches_gateway_and_worker_share_their_files() -> None:
    gateway, batch = (
        one.more
        for name in ("gateway", "batch")
        for one in from_systemd(batches=True)
        if one.name == name
    )
    assert gateway["StateDirectory"] == batch["StateDirectory"] == ["tokenyard-files"]
    assert gateway["User"] == batch["User"]
    assert gateway["DynamicUser"][-1] == "no"
    assert {one.name for one in BATCHES.iterdir()} <= {f"{unit.name}.d" for unit in UNITS}
