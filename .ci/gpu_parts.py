"""The parts of the proof, each run in its own processes within a time limit."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu_install import python_of
from gpu_wheels import ROOT

#: Seconds that processes have to end.
_GRACE_S: Final = 15.0
_POLL_S: Final = 0.2
_LAST_LINES: Final = 40
_PR_SET_CHILD_SUBREAPER: Final = 36

_PYTEST: Final = ["-m", "pytest", "-q", "-p", "gpu_pytest", "-n", "0", "-m", "gpu"]
#: The tests marked `gpu`, split because together they exceed the limit of a part.
TESTS: Final[dict[str, list[str]]] = {
    "tests": ["local_contexts", "local_arithmetic", "local_life"],
    "tests_killed": ["inside", "yard_killed", "groups"],
}
#: Name -> the arguments of `python`.
PARTS: Final[dict[str, list[str]]] = {
    **{
        part: [*_PYTEST, *(f"tests/gpu/test_{name}.py" for name in names)]
        for part, names in TESTS.items()
    },
    "cold_start": ["-m", "benchmarks.cold_start", "--json"],
    "serving_1b": ["-m", "benchmarks.serving", "--shape", "1b", "--json"],
    "serving_8b": ["-m", "benchmarks.serving", "--shape", "8b", "--json"],
    "alternate": ["-m", "benchmarks.alternate", "--json"],
    "chaos": ["-m", "benchmarks.chaos", "--engine", "vllm", "--seed", "1", "--json"],
}


@dataclass
class Result:
    """The outcome of a part."""

    part: str
    #: "passed", "failed", "ended" (by its time limit) or "left processes".
    outcome: str
    seconds: float
    exit: int | None = None
    quick: bool = False
    command: str = ""
    #: The reason if it did not pass, in one sentence.
    why: str = ""
    #: Commands of the processes that it left, which were then killed.
    leftovers: list[str] = field(default_factory=list)
    figures: Any = None
    last_lines: list[str] = field(default_factory=list)

    def write(self, state: Path) -> None:
        """Write `state`/parts/PART.json, replacing an earlier run's."""
        folder = state / "parts"
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1)
        (folder / f"{self.part}.json").write_text(text, encoding="utf-8")


def run_part(
    part: str, state: Path, gpu: str, *, timeout_s: float, quick: bool, more: list[str]
) -> Result:
    """Run a part in the installed environment."""
    command = [str(python_of(state)), *arguments(part, gpu, quick=quick), *more]
    figures = state / "figures" / f"{part}.json"
    figures.parent.mkdir(parents=True, exist_ok=True)
    figures.unlink(missing_ok=True)
    out = "TOKENYARD_GPU_OUT" if part in TESTS else "TOKENYARD_BENCH_OUT"
    variables = environment(state, gpu) | {out: str(figures)}
    if part in TESTS:
        variables["PYTHONPATH"] = str(Path(__file__).parent)  # for gpu_pytest
    result = bounded(part, command, state, variables, timeout_s=timeout_s)
    result.quick = "--quick" in command
    if figures.is_file():
        # Exists even if the part was ended: tests and benchmarks write it as they run.
        result.figures = json.loads(figures.read_text(encoding="utf-8"))
    return result


def arguments(part: str, gpu: str, *, quick: bool) -> list[str]:
    """The arguments of `python`; tests have no short form."""
    found = list(PARTS[part])
    if quick and part not in TESTS:
        found.append("--quick")
        if gpu == "cpu" and "--shape" in found:
            # The weights alone would fill a small machine's memory.
            found[found.index("--shape") + 1] = "tiny"
    return found


def environment(state: Path, gpu: str) -> dict[str, str]:
    """The variables of each part: this device, no network, all files below `state`."""
    path = [state / "venv" / "bin", Path(sys.executable).parent]
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    if not _has_flashinfer(state):
        # vLLM 0.26 assumes FlashInfer is installed; vLLM's own sampler serves all sides alike.
        kept.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return kept | {
        "PATH": os.pathsep.join([*map(str, path), os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENYARD_TEST_DEVICE": gpu,
        "TOKENYARD_BENCH_MODELS": str(state / "models"),
        "XDG_CACHE_HOME": str(state / "cache"),
    }


def _has_flashinfer(state: Path) -> bool:
    """Whether the parts can import FlashInfer, from the wheels or the host's packages."""
    installed = state.glob("venv/lib/python*/site-packages/flashinfer")
    return any(installed) or importlib.util.find_spec("flashinfer") is not None


def bounded(
    part: str, command: list[str], state: Path, variables: dict[str, str], *, timeout_s: float
) -> Result:
    """Run a command to its end or time limit, and end every process that it leaves."""
    _adopt_orphans()
    log = state / "logs" / f"{part}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            in_time = _wait(lambda: process.poll() is not None, timeout_s)
            leftovers = _end(process, in_time=in_time)
        except BaseException:
            _kill_all()
            raise
    seconds = round(time.monotonic() - began, 1)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    outcome, why = _judge(process.returncode, timeout_s, leftovers, in_time=in_time)
    return Result(
        part=part,
        outcome=outcome,
        seconds=seconds,
        exit=process.returncode if in_time else None,
        command=" ".join(["python", *command[1:]]),
        why=why,
        leftovers=leftovers,
        figures=_figures(lines),
        last_lines=[] if outcome == "passed" else lines[-_LAST_LINES:],
    )


def _judge(code: int, timeout_s: float, leftovers: list[str], *, in_time: bool) -> tuple[str, str]:
    if not in_time:
        return "ended", f"It ran longer than its {timeout_s:g} s and was ended."
    if code:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        return "failed", f"It ended with {how}."
    if leftovers:
        return "left processes", f"It left {len(leftovers)} processes, which were ended."
    return "passed", ""


def _end(process: subprocess.Popen[bytes], *, in_time: bool) -> list[str]:
    """End running processes; returns the commands of those that outlived the main process."""
    if not in_time:
        # Like Ctrl+C, so that the part can still report what it measured.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        _wait(lambda: process.poll() is not None, _GRACE_S)
    _wait(lambda: not _descendants(process), _GRACE_S if in_time else 0.0)
    left = [_command(pid) for pid in _descendants(process)]
    _kill_all()
    process.wait()
    return left if in_time else []


def _adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that it can find them all."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants(process: subprocess.Popen[bytes] | None = None) -> list[int]:
    """Pids of all running descendants; collects those that have ended."""
    parents = dict(_parents())
    found = [pid for pid in parents if _is_below(pid, parents)]
    for pid in found:
        # `Popen` collects its own process.
        if process is None or pid != process.pid:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return [pid for pid in found if _is_running(pid)]


def _is_below(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                yield int(folder.name), int(_stat(folder)[1])


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return _stat(Path("/proc", str(pid)))[0] not in ("Z", "X")
    return False


def _stat(folder: Path) -> list[str]:
    """The fields of `stat` after the name, which may contain any character: state, parent, ..."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _command(pid: int) -> str:
    with suppress(OSError):
        text = Path("/proc", str(pid), "cmdline").read_text(errors="replace")
        return " ".join(text.replace("\0", " ").split())[:200] or f"process {pid}"
    return f"process {pid}"


def _kill_all() -> None:
    """Kill until none is left: a killed process may just have started another."""

    def none_left() -> bool:
        found = _descendants()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    _wait(none_left, _GRACE_S)


def _wait(done: Callable[[], bool], timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True


def _figures(lines: list[str]) -> Any:
    """The last JSON object of the output, on one line or several."""
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("{"):
            with suppress(ValueError):
                return json.loads("\n".join(lines[start:]))
            with suppress(ValueError):
                return json.loads(lines[start])
    return None
