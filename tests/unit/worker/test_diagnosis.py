"""Why a process could not be started: from its messages, or from its exit."""

from __future__ import annotations

import pytest

from tokenyard.protocol.texts import pip_install
from worker.host.diagnosis import (
    MOST_CHARACTERS,
    FailedStart,
    Phase,
    diagnose,
    last_lines,
    paragraph,
)

WARMING: Phase = "warming up"
LOADING: Phase = "loading the model"


def said(text: str, phase: Phase = WARMING) -> FailedStart:
    return FailedStart(phase, status=1, said=text, model="org/adder")


#: A death, the name of its cause, whether a retry is useless, and a word of the remedy.
CAUSES = {
    "SIGILL": (FailedStart(WARMING, "SIGILL"), "illegal instruction", False, "avx512f"),
    "no AVX2": (
        said("DeviceUnusable: this CPU does not have avx2, which vLLM's CPU build needs"),
        "this CPU or GPU cannot be used",
        True,
        "--device cpu does not help",
    ),
    "SIGBUS": (FailedStart(WARMING, "SIGBUS"), "shared memory is full", False, "/dev/shm"),
    "SIGKILL": (FailedStart(WARMING, "SIGKILL"), "killed", False, "dmesg"),
    "SIGKILL in a load": (FailedStart(LOADING, "SIGKILL"), "killed", False, "kv_cache_gib"),
    "no vLLM": (
        said("ModuleNotFoundError: No module named 'vllm'"),
        "vLLM is not installed",
        True,
        pip_install("cli,worker"),
    ),
    "no torch": (
        said("ModuleNotFoundError: No module named 'torch'"),
        "vLLM is not installed",
        True,
        "pip install --no-deps -r requirements.txt",
    ),
    "another package": (
        said("ModuleNotFoundError: No module named 'psutil'"),
        "a Python package is missing",
        True,
        "pip install psutil",
    ),
    "a package that transformers names": (
        said("ImportError: X requires the Torchvision library but it was not found", LOADING),
        "a Python package is missing",
        True,
        "pip install Torchvision.",
    ),
    "a package of remote code": (
        said(
            "ImportError: This modeling file requires the following packages that were not found in"
            " your environment: einops. Run `pip install einops`",
            LOADING,
        ),
        "a Python package is missing",
        True,
        "pip install einops.",
    ),
    "a package that vLLM names": (
        said("ImportError: Please install torchao>=0.10.0 via `pip install torchao`", LOADING),
        "a Python package is missing",
        True,
        "pip install torchao.",
    ),
    "a package of another name": (
        said(
            "ImportError: Cohere's parser requires the `cohere_melody` package. Install it with:\n"
            "    pip install 'cohere-melody>=0.14.0'",
            LOADING,
        ),
        "a Python package is missing",
        True,
        "pip install cohere-melody.",
    ),
    "an architecture of tomorrow": (
        said(
            "ValueError: Transformers does not recognize this architecture. You can update with"
            " `pip install --upgrade transformers` or"
            " `pip install git+https://github.com/huggingface/transformers.git`",
            LOADING,
        ),
        "unknown architecture",
        True,
        "newer vLLM",
    ),
    "an old vLLM": (
        said("ModuleNotFoundError: No module named 'vllm.v1.worker.cpu_worker'"),
        "the versions do not fit",
        True,
        "0.26",
    ),
    "a renamed class": (
        said("ImportError: cannot import name 'LLMEngine' from 'vllm.v1' (/x/vllm/v1/__init__.py)"),
        "the versions do not fit",
        True,
        "pip list",
    ),
    "torch of another build": (
        said("ImportError: /x/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"),
        "the versions do not fit",
        True,
        "requirements.txt",
    ),
    "libnuma": (
        said("ImportError: libnuma.so.1: cannot open shared object file: No such file"),
        "libnuma is missing",
        True,
        "apt install libnuma1",
    ),
    "libcuda": (
        said("OSError: libcudart.so.12: cannot open shared object file: No such file"),
        "CUDA is missing",
        True,
        "libcudart.so.12",
    ),
    "some library": (
        said("OSError: libGL.so.1: cannot open shared object file: No such file"),
        "a library is missing",
        True,
        "libGL.so.1",
    ),
    **{
        name: (said(text), "CUDA cannot be used", False, "--device cpu")
        for name, text in {
            "no GPU": "RuntimeError: No CUDA GPUs are available",
            "an old driver": "RuntimeError: The NVIDIA driver on your system is too old (found 1).",
            "torch for a CPU": "AssertionError: Torch not compiled with CUDA enabled",
        }.items()
    },
    "GPU memory": (
        said("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", LOADING),
        "GPU memory",
        False,
        "gpu_memory_utilization",
    ),
    "host memory": (
        said("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", LOADING),
        "memory",
        False,
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    "C++ without memory": (
        FailedStart(LOADING, "SIGABRT", output=["terminate called after 'std::bad_alloc'"]),
        "memory",
        False,
        "--slots",
    ),
    "a full disk": (
        said("OSError: [Errno 28] No space left on device: '/tmp/x'"),
        "no disk space",
        False,
        "df -h",
    ),
    "a path of nothing": (
        said("OSError: /nope is not a local folder and is not a valid model identifier", LOADING),
        "no such model",
        True,
        "'org/adder'",
    ),
    "an empty folder": (
        said("ValueError: Invalid repository ID or local directory specified: '/x'", LOADING),
        "no such model",
        True,
        "config.json",
    ),
    "no network": (
        said("LocalEntryNotFoundError: outgoing traffic has been disabled", LOADING),
        "the hub cannot be reached",
        False,
        "HF_HUB_OFFLINE",
    ),
    "an architecture": (
        said("ValidationError: Model architectures ['Foo'] are not supported for now.", LOADING),
        "unknown architecture",
        True,
        "newer vLLM",
    ),
    "a truncated file": (
        said("SafetensorError: Error while deserializing header: invalid header length", LOADING),
        "broken files",
        True,
        "checksums",
    ),
    "an unknown argument": (
        said("TypeError: EngineArgs.__init__() got an unexpected keyword argument 'x'", LOADING),
        "a setting is refused",
        True,
        "option",
    ),
    "a time-out": (
        FailedStart(WARMING, said="still warming after 601 s"),
        "too slow",
        False,
        "--start-timeout-s",
    ),
    "an error of CUDA in a process that was warm": (
        said("DeviceLost: RuntimeError: CUDA error: an illegal memory access", LOADING),
        "a CUDA error",
        False,
        "Xid",
    ),
    "a GPU whose memory did not suffice for a model that can sleep": (
        said("DeviceLost: OutOfMemoryError: CUDA out of memory. Tried to allocate", LOADING),
        "GPU memory",
        False,
        "nvidia-smi",
    ),
    "another exception": (said("ZeroDivisionError: by zero"), "ZeroDivisionError", False, "log"),
    "another signal": (FailedStart(WARMING, "SIGSEGV"), "SIGSEGV", False, "log"),
    "another status": (FailedStart(WARMING, status=7), "exit status 7", False, "log"),
}


@pytest.mark.parametrize(("death", "cause", "is_final", "todo"), CAUSES.values(), ids=CAUSES.keys())
def test_each_cause_has_its_name_and_remedy(
    death: FailedStart, cause: str, is_final: bool, todo: str
) -> None:
    found = diagnose(death)
    assert (found.cause, found.is_final) == (cause, is_final)
    assert todo in found.remedy


def test_a_missing_file_in_the_warm_up_is_no_fault_of_the_model() -> None:
    # It has nothing to do with the model.
    death = said("FileNotFoundError: [Errno 2] No such file or directory: '/x/config.json'")
    assert diagnose(death).cause == "FileNotFoundError"


OUTPUT = """\
2026-11-22 08:21:54,647 INFO tokenyard.worker.process: starts
(w-0 pid=28142) WARNING 11-22 08:31:15 [cpu.py:224] Triton is not installed.
/x/vllm/dispatcher.py:138: FutureWarning: `reduce_op` is deprecated
  if hasattr(value, "__dict__"):
[W1122 08:31:16.532890809 utils.cpp:68] Warning: NUMA binding
W1122 08:31:11.469000 27796 torch/_library/triton.py:53] Triton not available

Traceback (most recent call last):
  File "/x/a.py", line 3, in run
    do()
RuntimeError: the first reason
terminate called after throwing an instance of 'std::runtime_error'
  what():  the last word
"""


def test_only_the_relevant_lines_of_the_output_are_shown() -> None:
    death = FailedStart(WARMING, "SIGABRT", output=OUTPUT.splitlines())
    assert last_lines(death) == [
        "RuntimeError: the first reason",
        "terminate called after throwing an instance of 'std::runtime_error'",
        "what():  the last word",
    ]


def test_the_innermost_place_of_a_crash_is_shown() -> None:
    crash = [
        "Fatal Python error: Illegal instruction",
        "",
        "Current thread 0x00007f (most recent call first):",
        '  File "/v/lib/python3.11/site-packages/vllm/attention.py", line 612 in forward',
        '  File "/v/lib/python3.11/site-packages/torch/nn/module.py", line 5 in __call__',
    ]
    lines = last_lines(FailedStart(WARMING, "SIGILL", crash=crash))
    assert lines == ["It was in forward (vllm/attention.py, line 612)."]


def test_the_beginning_of_an_exception_is_shown_without_its_input() -> None:
    text = (
        "ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, max_model_len (9) is too long [type=value_error, input_value=Args(), x]\n"
        "    For further information visit https://errors.pydantic.dev/2.13/v/value_error\n"
        f"{'x' * 1000}\n"
    )
    lines = last_lines(said(text, LOADING))
    assert lines[1] == "Value error, max_model_len (9) is too long"
    assert len(lines) == 3
    assert lines[2] == f"{'x' * MOST_CHARACTERS} ..."


def test_the_paragraph_gives_the_death_the_remedy_and_the_log() -> None:
    death = FailedStart(WARMING, "SIGILL")
    told = paragraph(death, diagnose(death), 3, "/logs/worker.log").splitlines()
    assert "SIGILL (Illegal instruction) 3 times while warming up" in told[0]
    assert "--device cpu does not help" in told[1]
    assert "/logs/worker.log" in told[-1]
    assert len(told) == 3
    assert all(line.strip() for line in told)


def test_the_model_is_named() -> None:
    death = said("SafetensorError: no", LOADING)
    told = paragraph(death, diagnose(death), 1, "above")
    assert told.startswith("The model 'org/adder' cannot be loaded: a process failed once")


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("RuntimeError: Address already in use", "No module named 'vllm._C'"),
        ("RuntimeError: x", "json.decoder.JSONDecodeError: Expecting value"),
        ("OSError: Invalid repository ID or local directory", "MaxRetryError(host='hub')"),
        ("", "No module named 'flash_attn', falling back"),
        ("", "To make it fast, please install orjson by `pip install orjson`"),
    ],
)
def test_a_mere_warning_ends_no_host(text: str, output: str) -> None:
    # Given an unrelated exception, or none, beside a library's warning
    death = FailedStart(
        LOADING, status=1, said=text, output=(f"WARNING {output}",), model="org/adder"
    )
    # I expect another try.
    assert not diagnose(death).is_final


def test_a_signal_without_a_name_is_shown_by_its_number() -> None:
    death = FailedStart(WARMING, "signal 40", status=-40)
    assert "ended by signal 40" in paragraph(death, diagnose(death), 3, "above")
