"""Workers that cannot start: every program that runs them ends with one paragraph."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.cli.running import ROOT, Command, StartUp, tokenyard
from tests.support.processes import is_gone
from tests.support.servers import Server
from tests.support.vllm_versions import write_distribution
from tests.support.waiting import eventually
from tokenyard.process.program import Exit
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.texts import pip_install

pytestmark = pytest.mark.crash

WAIT_S = 100.0
#: A package that shadows vLLM, as if it were no longer there.
#: The core of a process dies of it before the front, which says why.
NO_VLLM = """
import time, setproctitle
if setproctitle.getproctitle().startswith("tokenyard worker "):
    time.sleep(0.5)
raise ModuleNotFoundError("No module named 'vllm'", name='vllm')
"""
SOON = {"TOKENYARD_WORKER_BACKOFF_S": "0.05"}


@pytest.fixture
def no_vllm(tmp_path: Path) -> dict[str, str]:
    """An environment with a CPU build of vLLM that cannot be imported."""
    (tmp_path / "path" / "vllm").mkdir(parents=True)
    write_distribution(tmp_path / "path")
    (tmp_path / "path" / "vllm" / "__init__.py").write_text(NO_VLLM)
    return {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}"}


def check(status: int, told: str, *words: str) -> str:
    """Check that a program failed with one paragraph with these words; return the paragraph."""
    assert status == Exit.START_FAILED, told
    assert "Traceback" not in told
    (paragraph,) = f"\n{told}".split("\nError: ")[1:]
    for word in (*words, "The log is"):
        assert paragraph.count(word) == 1, (word, told)
    assert "\n\n" not in paragraph.strip()
    return paragraph


class Worker(Command):
    """One run of `tokenyard worker`."""

    def wait(self) -> tuple[int, str]:
        """Wait for the end of all its processes; its exit status and its messages."""
        mine = psutil.Process(self.process.pid)
        family: set[int] = set()

        def ended() -> bool:
            if self.process.poll() is None:
                family.update(child.pid for child in mine.children(recursive=True))
            return self.process.poll() is not None

        eventually(ended, timeout_s=WAIT_S)
        eventually(lambda: all(map(is_gone, family)))
        assert family
        return self.process.returncode, self.said


StartWorker = Callable[..., Worker]


@pytest.fixture
def start_worker(valkey_broker: Server, keys: Keys, tmp_path: Path) -> Iterator[StartWorker]:
    """A function that starts `tokenyard worker` with options and variables."""
    place = ("--redis-url", valkey_broker.url, "--yard", keys.yard)
    with ExitStack() as stack:

        def start(*options: str, **env: str) -> Worker:
            words = (*place, "worker", "--name", "w", *options)
            return stack.enter_context(Worker(tmp_path / "log", *words, **SOON, **env))

        yield start


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "words"),
    [
        ("illegal", ("SIGILL (Illegal instruction) 3 times while warming up", "avx512f")),
        ("warming", ("SIGKILL (Killed) 3 times while warming up", "dmesg")),
        ("loading", ("SIGKILL (Killed) 3 times while loading the model", "kv_cache_gib")),
    ],
)
def test_a_worker_that_keeps_dying_ends_after_three_deaths(
    start_worker: StartWorker, point: str, words: tuple[str, ...]
) -> None:
    options = ("--engine", "simulated", "--model", "some", "--crash-point", point)
    worker = start_worker(*options)
    status, told = worker.wait()
    check(status, told, *words, str(worker.log))
    assert told.count("process died") == 3


@pytest.mark.long
def test_a_worker_without_vllm_prints_how_to_install_it(
    start_worker: StartWorker, no_vllm: dict[str, str]
) -> None:
    worker = start_worker("--model", "org/m", **no_vllm)
    check(*worker.wait(), "No module named 'vllm'", pip_install("cli,worker"))


def test_a_missing_model_ends_the_worker_immediately(start_worker: StartWorker) -> None:
    worker = start_worker("--model", "/no/model")
    assert worker.process.wait(WAIT_S) == Exit.USAGE
    assert worker.said == "Error: model: there is no /no/model on this host\n"


@pytest.mark.long
def test_a_retrying_worker_continues_and_explains_once(start_worker: StartWorker) -> None:
    options = ("--engine", "simulated", "--crash-point", "illegal", "--on-start-failure", "retry")
    worker = start_worker(*options, "--max-backoff-s", "0.1")
    eventually(lambda: worker.said.count("process died") > 8, timeout_s=WAIT_S)
    worker.process.terminate()
    status, told = worker.wait()
    assert status == Exit.OK
    assert told.count("SIGILL (Illegal instruction) 3 times") == 1


@pytest.mark.long
def test_one_working_process_keeps_its_host_alive(start_worker: StartWorker) -> None:
    # Given a host whose second process keeps dying
    options = ("--engine", "simulated", "--slots", "2", "--crash-point", "stall")
    worker = start_worker(*options)
    controller = psutil.Process(worker.process.pid)

    def stalled() -> list[psutil.Process]:
        children = controller.children(recursive=True)
        return [one for one in children if one.status() == psutil.STATUS_STOPPED]

    def both() -> list[psutil.Process]:
        found = stalled()
        return found if len(found) == 2 else []

    first, other = eventually(both, timeout_s=WAIT_S)
    first.resume()
    for _ in range(4):
        (victim,) = eventually(lambda: [one for one in stalled() if one != first], timeout_s=WAIT_S)
        victim.kill()
        victim.wait(WAIT_S)
    eventually(
        lambda: "The workers of this host cannot start" in worker.said,
        timeout_s=WAIT_S,
    )
    assert worker.process.poll() is None
    for one in stalled():
        one.kill()
    worker.process.terminate()
    assert worker.wait()[0] == Exit.OK
    assert is_gone(other.pid)


@pytest.mark.long
@pytest.mark.parametrize("point", ["illegal", "loading"])
def test_up_ends_with_the_workers_paragraph(start_up: StartUp, point: str) -> None:
    up = start_up(env={"TOKENYARD_WORKER_CRASH_POINT": point, **SOON})
    eventually(lambda: "coordinator: leads" in up.said or up.process.poll(), timeout_s=WAIT_S)
    up.family = [child.pid for child in psutil.Process(up.process.pid).children(recursive=True)]
    status = up.wait(WAIT_S)
    log = up.data_dir / "logs" / "worker.log"
    paragraph = check(status, up.said, str(log), f"SIG{'ILL' if point == 'illegal' else 'KILL'}")
    assert log.read_text().endswith(f"Error: {paragraph.strip()}\n")
    assert "has ended, status" not in up.said
    assert up.family
    up.wait_all_gone()


@pytest.mark.long
def test_demo_ends_and_keeps_its_logs_after_a_failed_start(
    no_vllm: dict[str, str], tmp_path: Path
) -> None:
    done = tokenyard("demo", env={**no_vllm, "TMPDIR": str(tmp_path)})
    paragraph = check(done.returncode, done.stderr, "No module named 'vllm'", "pip install '")
    (log,) = tmp_path.glob("tokenyard-demo-*/logs/worker.log")
    assert str(log) in paragraph
    assert "Everything is stopped." in done.stdout
    assert "Traceback" not in done.stdout + log.read_text()


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broken", ["weights", "architecture"])
def test_a_broken_model_ends_a_worker_with_a_real_engine(
    start_worker: StartWorker, tmp_path: Path, broken: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples" / "arithmetic" / "models" / "adder", model)
    if broken == "weights":
        (weights,) = model.glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:1000])
        words = ["SafetensorError", "broken or incomplete"]
    else:
        config = model / "config.json"
        config.write_text(config.read_text().replace("LlamaForCausalLM", "NewForCausalLM"))
        words = ["NewForCausalLM", "take a newer vLLM"]
    options = ("--model", str(model), "--enforce-eager")
    worker = start_worker(*options)
    check(worker.process.wait(280), worker.said, *words)
