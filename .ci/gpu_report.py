"""A JSON and a Markdown report of the parts that have run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_SMI: Final = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total",
    "--format=csv,noheader",
)
#: A longer list of numbers is reported as its median.
_FEW: Final = 4


def report(state: Path, parts: list[str], gpu: str) -> bool:
    """Write `state`/gpu.json and gpu.md; returns whether all requested parts passed."""
    found = [_result(state, part) for part in ["install", *parts]]
    told = {"device": gpu, "machine": _machine(found[0]), "parts": found}
    (state / "gpu.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (state / "gpu.md").write_text(markdown(told), encoding="utf-8")
    return all(part["outcome"] == "passed" for part in found)


def _result(state: Path, part: str) -> dict[str, Any]:
    path = state / "parts" / f"{part}.json"
    if not path.is_file():
        return {"part": part, "outcome": "not run", "seconds": None, "figures": None}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _machine(install: dict[str, Any]) -> dict[str, str]:
    installed = install.get("figures") or {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names = ("vllm", "torch", "transformers", "python", "tokenyard")
    return {
        **_gpus(),
        "CPU": f"{cores} cores of {_processor()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        **{name: str(installed[name]) for name in names if name in installed},
        **({"left out of the wheels": left} if (left := _left_out(installed)) else {}),
    }


def _left_out(installed: dict[str, Any]) -> str:
    return ", ".join(Path(name).name for name in installed.get("left_out", []))


def _gpus() -> dict[str, str]:
    if shutil.which(_SMI[0]) is None:
        return {"GPU": "none"}
    done = subprocess.run(_SMI, capture_output=True, text=True, timeout=30.0, check=False)
    rows = [row.split(", ") for row in done.stdout.splitlines() if row.count(", ") == 2]
    if not rows:
        return {"GPU": "none"}
    return {
        "GPU": " and ".join(f"{name} ({memory})" for name, _, memory in rows),
        "driver": rows[0][1],
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.machine()


def markdown(told: dict[str, Any]) -> str:
    """The report as Markdown: the machine, the parts, and each part's figures."""
    lines = [
        "# The proof on a GPU" if told["device"] == "cuda" else "# The proof, rehearsed on a CPU"
    ]
    lines += ["", *_table(("what", "which"), told["machine"].items())]
    rows = [
        (part["part"], _outcome(part), _plain(part["seconds"]), part.get("command", ""))
        for part in told["parts"]
    ]
    lines += ["", "## Parts", "", *_table(("part", "outcome", "seconds", "command"), rows)]
    for part in told["parts"]:
        figures = list(_flat(part["figures"])) if part["part"] != "install" else []
        if figures:
            lines += ["", f"## {part['part']}", "", *_table(("figure", "value"), figures)]
        if part["outcome"] not in ("passed", "not run"):
            lines += ["", f"## {part['part']}: {part['outcome']}", "", part.get("why", "")]
            lines += [f"- left running: `{each}`" for each in part.get("leftovers", [])]
            lines += ["", "```", *part.get("last_lines", []), "```"]
    return "\n".join(lines) + "\n"


def _outcome(part: dict[str, Any]) -> str:
    return f"{part['outcome']}, quick" if part.get("quick") else str(part["outcome"])


def _table(head: tuple[str, ...], rows: Any) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(head), *cells]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Flatten to names like `a.b.0` with values; long lists of numbers become their median."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and len(value) > _FEW and all(_is_number(v) for v in value):
        yield name, f"{_plain(statistics.median(value))} (median of {len(value)})"
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _flat(inner, f"{name}.{number}" if name else str(number))
    elif value is not None:
        yield name, _plain(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
