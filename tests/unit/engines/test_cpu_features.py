"""A CPU that vLLM supports starts; any other is refused with one sentence."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from unittest import mock

import pytest

from tokenyard.protocol.settings import WorkerSettings
from worker.engines import DeviceUnusable, cpu_features
from worker.engines.cpu_features import (
    check_cpu,
    features_here,
    features_of,
    missing_features,
    missing_here,
)
from worker.engines.loading import make_backend, make_core_backend, prepare_host

ROOT = Path(__file__).resolve().parents[3]
#: Calls that make a vLLM engine in the program's own process.
ENGINE_MAKERS = (" LLM(", "LLMEngine.from_", " EngineCore(")
#: How such a program requests AMX: with this project's function, or with torch's.
REQUESTS = {"request_amx()", "torch.cpu._init_amx()"}

# Feature lists as Linux shows them, without the features that no code here checks.
NEHALEM = "fpu sse sse2 ht syscall nx pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
SANDY_BRIDGE = f"{NEHALEM} pclmulqdq aes xsave avx"
HASWELL = f"{SANDY_BRIDGE} fma movbe f16c rdrand abm bmi1 avx2 bmi2"
KNIGHTS_LANDING = f"{HASWELL} adx avx512f avx512pf avx512er avx512cd"
SKYLAKE_X = f"{HASWELL} adx avx512f avx512dq clwb avx512cd avx512bw avx512vl"
COOPER_LAKE = f"{SKYLAKE_X} avx512_vnni avx512_bf16"
ZEN_2 = f"{HASWELL} sse4a misalignsse adx sha_ni clzero"
ZEN_4 = (
    f"{ZEN_2} avx512f avx512dq avx512ifma avx512cd avx512bw avx512vl avx512_bf16 avx512vbmi"
    " avx512_vbmi2 gfni vaes avx512_vnni avx512_bitalg avx512_vpopcntdq"
)
SAPPHIRE_RAPIDS = f"{ZEN_4} avx_vnni amx_bf16 avx512_fp16 amx_tile amx_int8"
HALF_MASKED = COOPER_LAKE.replace(" avx512_vnni", "")  # as on some virtual machines
CORTEX_A72 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
GRAVITON_2 = f"{CORTEX_A72} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp ssbs"
GRAVITON_3 = f"{GRAVITON_2} sve i8mm bf16 dgh rng"


@pytest.mark.parametrize(
    ("machine", "features", "missing"),
    [
        ("x86_64", NEHALEM, ["avx2", "fma", "f16c"]),
        ("x86_64", SANDY_BRIDGE, ["avx2", "fma", "f16c"]),
        ("x86_64", HASWELL, []),
        ("x86_64", KNIGHTS_LANDING, ["avx512bw", "avx512dq", "avx512vl"]),
        ("x86_64", SKYLAKE_X, []),
        ("x86_64", COOPER_LAKE, []),
        ("x86_64", ZEN_2, []),
        ("x86_64", ZEN_4, []),
        ("x86_64", SAPPHIRE_RAPIDS, []),
        ("x86_64", HALF_MASKED, ["avx512_vnni"]),
        ("aarch64", CORTEX_A72, ["asimddp", "asimdhp"]),
        ("aarch64", GRAVITON_2, []),
        ("aarch64", GRAVITON_3, []),
        ("ppc64le", "altivec vsx", []),
        ("arm64", "", []),  # macOS, which has no list
    ],
)
def test_missing_features_of_a_cpu_are_found(
    machine: str, features: str, missing: list[str]
) -> None:
    assert missing_features(machine, frozenset(features.split())) == missing


def test_features_are_those_that_all_cpus_of_the_host_have() -> None:
    x86 = f"processor\t: 0\nflags\t\t: {HASWELL}\nbugs\t\t: none\n\n"
    arm = f"processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: {GRAVITON_3}\nCPU part\t: 0xd40\n"
    mixed = f"Features\t: {GRAVITON_3}\n\nFeatures\t: {GRAVITON_2}\n"

    assert features_of(x86) == frozenset(HASWELL.split())
    assert features_of(arm) == frozenset(GRAVITON_3.split())
    assert features_of(mixed) == frozenset(GRAVITON_2.split())
    assert features_of("processor: 0\ncpu : POWER9\n") == frozenset()


def has_list() -> bool:
    """Whether this machine lists its CPU features in the format of x86 or ARM."""
    return platform.machine() in {"x86_64", "aarch64"} and Path("/proc/cpuinfo").exists()


@pytest.mark.skipif(not has_list(), reason="neither an x86 nor an ARM machine with Linux")
def test_the_list_of_this_machine_is_found() -> None:
    features = features_here()

    assert features & {"sse2", "asimd"}
    assert missing_here() == missing_features(platform.machine(), features)


@pytest.fixture
def sandy_bridge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine claims to have a CPU without AVX2."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {SANDY_BRIDGE}\n")
    monkeypatch.setattr(cpu_features, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.usefixtures("sandy_bridge")
def test_an_unsuitable_cpu_is_refused_in_one_sentence() -> None:
    with pytest.raises(DeviceUnusable, match=r"does not have avx2, fma, f16c, .* use another host"):
        check_cpu()
    settings = WorkerSettings(redis_url="redis://nowhere", model="any", device="cpu")
    with pytest.raises(DeviceUnusable):
        make_core_backend(settings, 0)
    with pytest.raises(DeviceUnusable):
        make_backend(settings, "/nowhere")


@pytest.mark.usefixtures("sandy_bridge")
@pytest.mark.vllm
def test_on_an_unsuitable_cpu_the_fork_server_does_not_import_vllm() -> None:
    with mock.patch.dict(os.environ):
        settings = WorkerSettings(redis_url="redis://nowhere", model="any")
        assert prepare_host(settings) == ["worker.process.main"]


def test_a_machine_without_a_list_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "_CPUINFO", Path("/nonexistent/cpuinfo"))

    check_cpu()


def test_every_program_that_makes_an_engine_requests_amx() -> None:
    files = [
        file
        for folder in ("worker", "tests", "benchmarks", "examples")
        for file in (ROOT / folder).rglob("*.py")
        if file != Path(__file__) and any(maker in file.read_text() for maker in ENGINE_MAKERS)
    ]
    makers = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    makers.pop("worker/engines/vllm/core.py")  # `CoreBackend.begin_warm_up` requests it

    assert len(makers) >= 4
    assert [name for name, text in makers.items() if not REQUESTS & _lines(text)] == []


def _lines(text: str) -> set[str]:
    return {line.partition("#")[0].strip() for line in text.splitlines()}
