"""The device, models written for the tests, and one user of the device at a time.

Nothing here runs without TOKENYARD_TEST_DEVICE. With ``cuda`` the tests need a GPU and fail
without one; ``cpu`` rehearses them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engines.llama import write_llama
from tests.gpu.device import Device, name_of
from tests.gpu.local import Local, running_local
from tests.gpu.specs import FAMILIES

_DEVICE = "TOKENYARD_TEST_DEVICE"
_OUT = "TOKENYARD_GPU_OUT"
_AS_LOADED: dict[str, Any] = {"dtype": "bfloat16", "positions": 2048}
_HERE = Path(__file__).parent
#: Tests with the same processes run together; the most informative ones run first.
_ORDER = (
    "test_local_contexts",
    "test_local_arithmetic",
    "test_local_life",
    "test_inside",
    "test_yard_killed",
    "test_groups",
)
#: Fixtures that take at least this long are reported.
_LONG_S = 2.0
#: Most characters of a failure, from its end.
_MOST_TEXT = 3000
#: The tests ask no hub and send no usage data.
_APART = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; skip them with the reason if no device is set."""
    items.sort(key=lambda item: _ORDER.index(item.path.stem) if item.path.stem in _ORDER else -1)
    reason = f"needs a device: set {_DEVICE} to cuda, or to cpu for a rehearsal"
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not os.environ.get(_DEVICE):
            item.add_marker(pytest.mark.skip(reason=reason))


class Figures:
    """Measured values by name, written immediately to TOKENYARD_GPU_OUT, a file, or beside it."""

    def __init__(self, beside: str = "") -> None:
        self._beside = beside
        self._found: dict[str, Any] = {}

    def note(self, name: str, value: Any) -> None:
        """Keep a figure, and show it with the test's output."""
        print(f"{name}: {json.dumps(value)}")  # noqa: T201  # pytest shows it
        self.keep(name, value)

    def keep(self, name: str, value: Any) -> None:
        """Keep a figure."""
        self._found[name] = value
        if file := os.environ.get(_OUT):
            path = Path(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path = path.with_stem(path.stem + self._beside)
            path.write_text(json.dumps(self._found, indent=1))


class Outcomes:
    """Reports each test as soon as it ends, so that an interrupted run has reported it."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._kept = Figures("_outcomes")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line for each test, and the details of a failure."""
        is_whole = report.when == "call" or not report.passed
        if not is_whole and report.duration < _LONG_S:
            return
        told = f"{report.outcome} {report.when} {report.duration:.1f} s {report.nodeid}"
        self._terminal.write_line(f"\n{told}")
        failure = report.longreprtext[-_MOST_TEXT:] if report.failed else ""
        if failure:
            self._terminal.write_line(failure)
            self._terminal.write_line(report.capstdout[-_MOST_TEXT:])
        self._kept.keep(f"{report.nodeid} {report.when}", f"{told} {failure}".strip())


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Report outcomes immediately when a device is tested."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get(_DEVICE) and terminal is not None:
        config.pluginmanager.register(Outcomes(terminal))


@pytest.fixture(scope="session")
def figures(device: Device) -> Figures:
    """The figures of this run."""
    kept = Figures()
    kept.note("device", name_of(device))
    return kept


@pytest.fixture(scope="session")
def device() -> Device:
    """The device under test; the test fails without one.

    `worker.engines.devices` checks for those who start processes whether CUDA can use it.
    """
    name = os.environ[_DEVICE]
    if name not in ("cuda", "cpu"):
        pytest.fail(f"{_DEVICE}={name}: use cuda or cpu", pytrace=False)
    try:
        return Device(name)
    except Exception as fault:  # noqa: BLE001  # the driver's library has errors of its own
        why = f"{_DEVICE}={name}: {type(fault).__name__}: {fault}"
    pytest.fail(why, pytrace=False)


@pytest.fixture(scope="session")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of vLLM's compiled code: empty when the tests begin."""
    folder = tmp_path_factory.mktemp("vllm-cache")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_APART, "VLLM_CACHE_ROOT": str(folder)}.items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of all families: with random weights, and counting ones."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_llama(folder / family, family=family, seed=1, **_AS_LOADED)
        counting = folder / f"{family}-counts"
        write_llama(counting, family=family, seed=2, counts=True, layers=2, **_AS_LOADED)
    return folder


class Occupant:
    """The current user of the device: it leaves before another comes."""

    def __init__(self) -> None:
        self._what = ""
        self._now: Any = None
        self._stack = ExitStack()
        self._failed: dict[str, str] = {}

    def take(self, what: str, enter: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Return the user called ``what``; if it is not there yet, it replaces the current one.

        A user that failed to start is not tried again: the test fails with the same message.
        """
        if what in self._failed:
            pytest.fail(f"as before: {self._failed[what]}", pytrace=False)
        if self._what != what:
            self.leave()
            try:
                self._now, self._what = self._stack.enter_context(enter()), what
            except BaseException as fault:
                self._failed[what] = f"{what}: {type(fault).__name__}: {fault}"
                raise
        return self._now

    def leave(self) -> None:
        """Free the device."""
        self._what = ""
        self._stack.close()


@pytest.fixture
def local(occupant: Occupant, device: Device) -> Iterator[Local]:
    """A program's own pool with warm processes; a new one only after a test that broke it."""
    pool: Local = occupant.take("local", lambda: running_local(device))
    yield pool
    if not pool.is_warm_again():
        occupant.leave()
        pytest.fail(f"this test has left a pool that is not warm: {pool.told()}", pytrace=False)


@pytest.fixture(scope="session")
def occupant(no_leftover_processes: None, cache_root: Path, device: Device) -> Iterator[Occupant]:
    """Keeps the processes of several test modules from running side by side."""
    kept = Occupant()
    yield kept
    kept.leave()
