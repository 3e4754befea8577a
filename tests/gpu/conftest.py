"""The device, models written for the tests, and one user of the device at a time.

Nothing here runs without TOKENYARD_TEST_DEVICE. ``cuda`` needs a GPU: where none can be used the
tests fail. ``cpu`` rehearses them.
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
#: Whoever uses the same processes comes one after the other; what tells most comes first.
_ORDER = (
    "test_local_contexts",
    "test_local_arithmetic",
    "test_local_life",
    "test_inside",
    "test_yard_killed",
    "test_groups",
)
#: A fixture that takes so long is told of.
_LONG_S = 2.0
#: Most characters of a failure, from its end.
_MOST_TEXT = 3000
#: The tests ask no hub and tell nobody.
_APART = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder; without a device it is skipped, with the reason."""
    items.sort(key=lambda item: _ORDER.index(item.path.stem) if item.path.stem in _ORDER else -1)
    reason = f"needs a device: set {_DEVICE} to cuda, or to cpu for a rehearsal"
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not os.environ.get(_DEVICE):
            item.add_marker(pytest.mark.skip(reason=reason))


class Figures:
    """What was found, by name: written to TOKENYARD_GPU_OUT, a file, or beside it, as it comes."""

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
    """Tells of each test as soon as it has ended: a run that is cut short has said it by then."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal
        self._kept = Figures("_outcomes")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line for each test, and what there is to say of a failure."""
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
    """Tell outcomes as they come, where a device is tested."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get(_DEVICE) and terminal is not None:
        config.pluginmanager.register(Outcomes(terminal))


@pytest.fixture(scope="session")
def figures(device: Device) -> Figures:
    """What is measured in this run."""
    kept = Figures()
    kept.note("device", name_of(device))
    return kept


@pytest.fixture(scope="session")
def device() -> Device:
    """The device under test; the test fails where there is none.

    Whether CUDA can use it, those who start processes there are told (`worker.engines.devices`).
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
    """Where vLLM keeps what it has compiled: empty when the tests begin."""
    folder = tmp_path_factory.mktemp("vllm-cache")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_APART, "VLLM_CACHE_ROOT": str(folder)}.items():
            patch.setenv(name, value)
        yield folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of all families, of random weights and such that count."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        write_llama(folder / family, family=family, seed=1, **_AS_LOADED)
        counting = folder / f"{family}-counts"
        write_llama(counting, family=family, seed=2, counts=True, layers=2, **_AS_LOADED)
    return folder


class Occupant:
    """Whoever uses the device now: it goes before another one comes."""

    def __init__(self) -> None:
        self._what = ""
        self._now: Any = None
        self._stack = ExitStack()
        self._failed: dict[str, str] = {}

    def take(self, what: str, enter: Callable[[], AbstractContextManager[Any]]) -> Any:
        """The one who is called ``what``, who comes if another one is there.

        Who could not come once is not waited for again: the test fails with the same words.
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
        """Nobody uses the device any more."""
        self._what = ""
        self._stack.close()


@pytest.fixture
def local(occupant: Occupant, device: Device) -> Iterator[Local]:
    """A pool of a program's own, whose processes are warm; a new one where a test has left others.

    It is not started for each test.
    """
    pool: Local = occupant.take("local", lambda: running_local(device))
    yield pool
    if not pool.is_warm_again():
        occupant.leave()
        pytest.fail(f"this test has left a pool that is not warm: {pool.told()}", pytrace=False)


@pytest.fixture(scope="session")
def occupant(no_leftover_processes: None, cache_root: Path, device: Device) -> Iterator[Occupant]:
    """Keeps the processes of several modules of tests from running side by side."""
    kept = Occupant()
    yield kept
    kept.leave()
