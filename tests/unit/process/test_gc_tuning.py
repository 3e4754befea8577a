"""How often services look for garbage; in processes of their own, since it is a setting of each."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tokenyard.process.gc_tuning import SELDOM

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
