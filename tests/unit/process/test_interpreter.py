"""What services set for themselves: in processes of their own, since it is a setting of each."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading
from contextvars import ContextVar
from pathlib import Path

import pytest

from tokenyard.process.interpreter import DEEP_STACK, SELDOM, run_deep

#: Runs a service's command line with a body that only says what the collector was told.
SERVICE = """
import gc
from {name}.__main__ import TEXTS
from tokenyard.process.program import program
from tokenyard.protocol.settings import {settings}

def run(settings):
    print(gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 10_000)
    return 0

main = program("{name}", {settings}, run, texts=TEXTS)
main(["--redis-url", "redis://nowhere", *{more}])
"""
_PROGRAM = """
import threading
from tokenyard.process.interpreter import end_with_threads
end_with_threads()
threading.Thread(target=lambda: {}["leases"], name="leases").start()
threading.Event().wait()
"""


def test_an_error_that_ends_a_thread_ends_the_process_with_the_reason() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "leases" in ended.stderr
    assert "KeyError" in ended.stderr


def test_what_runs_deep_has_the_callers_context_and_a_deep_stack() -> None:
    name: ContextVar[str] = ContextVar("name")
    name.set("mine")
    usual = threading.stack_size()

    def look() -> tuple[str, int]:
        largest = max(int(end, 16) - int(begin, 16) for begin, end in _mappings())
        return name.get(), largest

    found, largest = run_deep(look).result(60)
    assert found == "mine"
    assert largest >= DEEP_STACK
    assert threading.stack_size() == usual
    with pytest.raises(KeyError):
        run_deep(lambda: {}["a"]).result(60)


def _mappings() -> list[tuple[str, str]]:
    text = Path("/proc/self/maps").read_text()
    return re.findall("^([0-9a-f]+)-([0-9a-f]+) rw-p", text, re.MULTILINE)


def test_the_main_thread_may_grow_deep() -> None:
    program = "import resource; from tokenyard.process import interpreter; "
    program += "interpreter.deepen_main(); print(resource.getrlimit(resource.RLIMIT_STACK)[0])"
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    wanted = DEEP_STACK if most == resource.RLIM_INFINITY else min(DEEP_STACK, most)
    assert int(found.stdout) in (wanted, resource.RLIM_INFINITY)


@pytest.mark.parametrize(
    ("name", "settings", "more"),
    [
        ("coordinator", "CoordinatorSettings", []),
        ("worker", "WorkerSettings", ["--engine", "simulated"]),
    ],
)
def test_services_collect_seldom_but_do_collect(name: str, settings: str, more: list[str]) -> None:
    script = SERVICE.format(name=name, settings=settings, more=more)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"True {SELDOM} True\n", done.stderr


def test_a_client_keeps_what_its_program_has_chosen() -> None:
    script = "import gc; before = gc.get_threshold(), gc.get_freeze_count()\n"
    script += "import tokenyard; tokenyard.Client\n"
    script += "assert (gc.get_threshold(), gc.get_freeze_count()) == before"
    subprocess.run([sys.executable, "-c", script], check=True)
