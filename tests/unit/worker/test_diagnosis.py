"""Why a process could not be started, from its messages or its exit, and when a host gives up."""

from __future__ import annotations

import pytest

from tokenyard.protocol.texts import pip_install
from worker.host.diagnosis import (
    MOST_CHARACTERS,
    FailedStart,
    Phase,
    StartFailure,
    StartFailures,
    diagnose,
    last_lines,
    paragraph,
)

WARMING: Phase = "warming up"
LOADING: Phase = "loading the model"
CANNOT_OPEN = "cannot open shared object file: No such file"


def said(text: str, phase: Phase = WARMING) -> FailedStart:
    return FailedStart(phase, status=1, said=text, model="org/adder")


#: Ends without an exception, the names of their causes, and a word of each remedy.
ENDS = [
    (FailedStart(WARMING, "SIGILL"), "illegal instruction", "avx512f"),
    (FailedStart(WARMING, "SIGBUS"), "shared memory is full", "/dev/shm"),
    (FailedStart(WARMING, "SIGKILL"), "killed", "dmesg"),
    (FailedStart(LOADING, "SIGKILL"), "killed", "kv_cache_gib"),
    (
        FailedStart(LOADING, "SIGABRT", output=["terminate called after 'std::bad_alloc'"]),
        "memory",
        "--slots",
    ),
    (FailedStart(WARMING, said="still warming after 601 s"), "too slow", "--start-timeout-s"),
    (FailedStart(WARMING, "SIGSEGV"), "SIGSEGV", "log"),
    (FailedStart(WARMING, status=7), "exit status 7", "log"),
]
#: A word of the remedy for each exception, by cause, whether a retry is useless, and phase.
SAID: dict[tuple[str, bool, Phase], dict[str, str]] = {
    ("this CPU or GPU cannot be used", True, WARMING): {
        "DeviceUnusable: this CPU does not have avx2, which": "--device cpu does not help",
    },
    ("vLLM is not installed", True, WARMING): {
        "ModuleNotFoundError: No module named 'vllm'": "--no-deps -r requirements.txt",
        "ModuleNotFoundError: No module named 'torch'": pip_install("cli,worker"),
    },
    ("a Python package is missing", True, WARMING): {
        "ModuleNotFoundError: No module named 'psutil'": "pip install psutil",
    },
    ("a Python package is missing", True, LOADING): {
        "ImportError: X requires the Torchvision library but it was not found": "Torchvision.",
        (
            "ImportError: This modeling file requires the following packages that were not found in"
            " your environment: einops. Run `pip install einops`"
        ): "pip install einops.",
        "ImportError: Please install torchao>=0.10.0 via `pip install torchao`": "torchao.",
        (
            "ImportError: Cohere's parser requires the `cohere_melody` package. Install it with:\n"
            "    pip install 'cohere-melody>=0.14.0'"
        ): "pip install cohere-melody.",
    },
    ("unknown architecture", True, LOADING): {
        "ValidationError: Model architectures ['Foo'] are not supported for now.": "newer vLLM",
        (
            "ValueError: Transformers does not recognize this architecture. You can update with"
            " `pip install --upgrade transformers` or"
            " `pip install git+https://github.com/huggingface/transformers.git`"
        ): "newer vLLM",
    },
    ("the versions do not fit", True, WARMING): {
        "ModuleNotFoundError: No module named 'vllm.v1.worker.cpu_worker'": "0.26",
        "ImportError: cannot import name 'LLMEngine' from 'vllm.v1' (/x)": "pip list",
        "ImportError: /x/vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda": "requirements.txt",
    },
    ("libnuma is missing", True, WARMING): {
        f"ImportError: libnuma.so.1: {CANNOT_OPEN}": "apt install libnuma1",
    },
    ("CUDA is missing", True, WARMING): {
        f"OSError: libcudart.so.12: {CANNOT_OPEN}": "libcudart.so.12",
    },
    ("a library is missing", True, WARMING): {f"OSError: libGL.so.1: {CANNOT_OPEN}": "libGL.so.1"},
    ("CUDA cannot be used", False, WARMING): {
        "RuntimeError: No CUDA GPUs are available": "--device cpu",
        "RuntimeError: The NVIDIA driver on your system is too old (found 1).": "--device cpu",
        "AssertionError: Torch not compiled with CUDA enabled": "--device cpu",
    },
    ("GPU memory", False, LOADING): {
        "torch.OutOfMemoryError: CUDA out of memory. Tried to": "gpu_memory_utilization",
        "DeviceLost: OutOfMemoryError: CUDA out of memory. Tried to": "nvidia-smi",
    },
    ("memory", False, LOADING): {
        "RuntimeError: DefaultCPUAllocator: can't allocate memory": "VLLM_CPU_KVCACHE_SPACE",
    },
    ("no disk space", False, WARMING): {
        "OSError: [Errno 28] No space left on device: '/tmp/x'": "df -h",
    },
    ("no such model", True, LOADING): {
        "OSError: /x is not a local folder and is not a valid model identifier": "'org/adder'",
        "ValueError: Invalid repository ID or local directory specified: '/x'": "config.json",
    },
    ("the hub cannot be reached", False, LOADING): {
        "LocalEntryNotFoundError: outgoing traffic has been disabled": "HF_HUB_OFFLINE",
    },
    ("broken files", True, LOADING): {
        "SafetensorError: Error while deserializing header: invalid header length": "checksums",
    },
    ("a setting is refused", True, LOADING): {
        "TypeError: EngineArgs.__init__() got an unexpected keyword argument 'x'": "option",
    },
    ("a CUDA error", False, LOADING): {
        "DeviceLost: RuntimeError: CUDA error: an illegal memory access": "Xid",
    },
    ("ZeroDivisionError", False, WARMING): {"ZeroDivisionError: by zero": "log"},
}


@pytest.mark.parametrize(
    ("death", "cause", "is_final", "todo"),
    [
        *((death, cause, False, todo) for death, cause, todo in ENDS),
        *(
            (said(text, phase), cause, is_final, todo)
            for (cause, is_final, phase), exceptions in SAID.items()
            for text, todo in exceptions.items()
        ),
    ],
)
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


def told(death: FailedStart, count: int = 3) -> str:
    """The paragraph about so many of these failures."""
    return paragraph(StartFailure(death, diagnose(death), count, is_hopeless=True), "/logs/w.log")


def test_the_paragraph_gives_the_death_the_remedy_and_the_log() -> None:
    first, second, last = told(FailedStart(WARMING, "SIGILL")).splitlines()
    assert "SIGILL (Illegal instruction) 3 times while warming up" in first
    assert "--device cpu does not help" in second
    assert "/logs/w.log" in last


def test_the_paragraph_names_the_model_and_a_signal_without_a_name() -> None:
    about = told(said("SafetensorError: no", LOADING), count=1)
    assert about.startswith("The model 'org/adder' cannot be loaded: a process failed once")
    assert "ended by signal 40" in told(FailedStart(WARMING, "signal 40", status=-40))


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


KILLED = FailedStart(WARMING, "SIGKILL")
ILLEGAL = FailedStart(WARMING, "SIGILL")
NO_VLLM = said("ModuleNotFoundError: No module named 'vllm'")
TOO_LARGE = FailedStart(LOADING, "SIGKILL", model="org/large")


def noted(*deaths: FailedStart) -> StartFailures:
    """Given these deaths, each of another process, of which three are enough."""
    failures = StartFailures(3)
    for number, death in enumerate(deaths):
        failures.note(f"w-{number}", death)
    return failures


@pytest.mark.parametrize(
    ("deaths", "worked", "is_pending", "ends"),
    [
        pytest.param([KILLED] * 2, [], False, None, id="two"),
        pytest.param([KILLED] * 3, [], False, True, id="three"),
        pytest.param([KILLED] * 3, [], True, None, id="another process is in its first try"),
        pytest.param([KILLED, ILLEGAL] * 2, [], False, None, id="of two kinds"),
        pytest.param([NO_VLLM], [], True, True, id="one whose cause is permanent"),
        pytest.param([KILLED] * 3, [WARMING], False, False, id="but one has become warm"),
        pytest.param([TOO_LARGE] * 3, [WARMING], False, True, id="no warm process can load"),
        pytest.param([TOO_LARGE] * 3, [LOADING], False, False, id="but one has loaded"),
    ],
)
def test_enough_failed_starts_of_a_kind_end_a_host_on_which_nothing_works(
    deaths: list[FailedStart], worked: list[Phase], is_pending: bool, ends: bool | None
) -> None:
    failures = noted(*deaths)
    for phase in worked:
        failures.worked(phase)

    found = failures.enough(is_pending=is_pending)

    assert failures.failed == {f"w-{number}" for number in range(len(deaths))}
    if ends is None:  # nothing is reported yet
        assert found is None
    else:
        assert found.is_hopeless is ends
        assert found.death is deaths[-1]


def test_each_kind_is_reported_once() -> None:
    failures = noted(KILLED, KILLED, KILLED)
    assert failures.enough(is_pending=False)
    failures.note("w", KILLED)
    assert failures.enough(is_pending=False) is None
    for _ in range(3):
        failures.note("w", ILLEGAL)
    assert failures.enough(is_pending=False)
