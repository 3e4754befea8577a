"""How benchmarks describe their machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import device
from benchmarks.device import used_mib, wait_until_free
from benchmarks.machine import Machine, machine, machine_facts


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    machine.cache_clear()
    yield
    machine.cache_clear()


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a script in the place of the driver's program."""

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_gpus_are_named_with_their_driver(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi("echo 'NVIDIA H100 80GB HBM3, 570.1'; echo 'NVIDIA H100 80GB HBM3, 570.1'")
    facts = machine_facts()
    assert facts["gpus"] == ("NVIDIA H100 80GB HBM3",) * 2
    assert facts["driver"] == "570.1"
    assert "2 x NVIDIA H100 80GB HBM3, driver 570.1" in str(machine())


def test_without_a_driver_no_gpu_is_reported(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi("echo 'NVIDIA-SMI has failed'; exit 9")
    assert (machine().gpus, machine().driver, used_mib()) == ((), None, 0.0)


def test_the_description_names_only_what_is_there() -> None:
    cpu = Machine("EPYC", 2, (), None, "3.12.3", None, None)
    assert str(cpu) == "2 cores of EPYC, Python 3.12.3"


def test_unmeasured_memory_is_not_waited_for(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi("echo '[N/A]'")
    wait_until_free(0.0)


def test_memory_that_stays_in_use_is_reported(
    monkeypatch: pytest.MonkeyPatch, nvidia_smi: Callable[[str], None]
) -> None:
    nvidia_smi("echo 20000; echo 3")
    monkeypatch.setattr(device, "_FREED_S", 0.0)
    with pytest.raises(TimeoutError, match="20,000 MiB of the GPU are taken, 400 before"):
        wait_until_free(400.0)
    wait_until_free(19_500.0)
