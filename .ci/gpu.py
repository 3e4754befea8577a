"""Proves Tokenyard on a GPU host without a network; docs/gpu.md says how, `make gpu` runs it.

    gpu.py wheels  FOLDER             where there is an index: fetch what the GPU host lacks
    gpu.py split   FOLDER PIECES      the folder as pieces of a bounded size
    gpu.py join    PIECES FOLDER      and back
    gpu.py install --wheels FOLDER    on the GPU host: into .gpu/venv
    gpu.py run     [PART ...]         the tests and the benchmarks, each bounded
    gpu.py report                     .gpu/gpu.json and .gpu/gpu.md
    gpu.py all     --wheels FOLDER    the last three

It needs Python 3.11 or newer and nothing else.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pathlib import Path
from typing import Final

import gpu_pieces
import gpu_wheels
from gpu_install import NotInstalled, install
from gpu_parts import PARTS, TESTS, Result, run_part
from gpu_report import report
from gpu_wheels import ROOT, DoesNotFit, Target

STATE: Final = ROOT / ".gpu"


def main() -> None:
    """Run a command; exits with 0 if all requested parts passed."""
    options = _parser().parse_args()
    try:
        passed = options.do(options)
    except (gpu_pieces.BadPieces, DoesNotFit) as refused:
        sys.exit(f"gpu.py {options.command}: {refused}")
    sys.exit(0 if passed else 1)


def _wheels(options: argparse.Namespace) -> bool:
    listed = gpu_wheels.read_requirements
    pins = listed((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    wanted = pins
    if options.gpu == "cuda":
        wanted = listed((ROOT / ".ci" / "gpu-requirements.txt").read_text(encoding="utf-8"))
    host = (
        listed(options.host_packages.read_text(encoding="utf-8")) if options.host_packages else {}
    )
    target = Target(
        python=options.python,
        machine=platform.machine(),
        glibc=options.glibc,
        torch=gpu_wheels.plain(host.get("torch", "")) or None,
    )
    lacking = gpu_wheels.lacking(wanted, pins, host)
    gpu_wheels.download(lacking, options.folder, target)
    found = sorted(options.folder.glob("*.whl"))
    if target.torch or options.gpu == "cpu":
        gpu_wheels.check(found, target)
    size = sum(wheel.stat().st_size for wheel in found) / gpu_pieces.MIB
    print(f"{len(found)} wheels, {size:.0f} MiB, in {options.folder}")
    return True


def _split(options: argparse.Namespace) -> bool:
    manifest = gpu_pieces.split(
        options.folder, options.pieces, mib=options.size, leave_out=options.leave_out
    )
    size = sum(piece.bytes for piece in manifest.pieces) / gpu_pieces.MIB
    print(f"{len(manifest.pieces)} pieces, {size:.0f} MiB, and their manifest in {options.pieces}")
    return True


def _join(options: argparse.Namespace) -> bool:
    began = time.monotonic()
    manifest = gpu_pieces.join(options.pieces, options.folder)
    seconds = time.monotonic() - began
    print(f"{len(manifest.wheels)} wheels in {options.folder}, {seconds:.1f} s")
    return True


def _install(options: argparse.Namespace) -> bool:
    began = time.monotonic()
    result = Result(part="install", outcome="passed", seconds=0.0)
    STATE.mkdir(exist_ok=True)
    try:
        result.figures = install(options.wheels, STATE, options.gpu, timeout_s=options.part_timeout)
    except (DoesNotFit, NotInstalled) as refused:
        result.outcome, result.why = "failed", str(refused)
    result.seconds = round(time.monotonic() - began, 1)
    _tell(result)
    return result.outcome == "passed"


def _run(options: argparse.Namespace) -> bool:
    if not (STATE / "venv" / "bin" / "python").exists():
        raise DoesNotFit(
            "Nothing is installed in .gpu: run `gpu.py install --wheels FOLDER` first."
        )
    results = []
    for part in options.parts or PARTS:
        print(f"{part} ...", flush=True)
        results.append(
            run_part(
                part,
                STATE,
                options.gpu,
                timeout_s=options.part_timeout,
                quick=options.quick,
                more=options.pytest if part in TESTS else [],
            )
        )
        _tell(results[-1])
    return all(result.outcome == "passed" for result in results)


def _report(options: argparse.Namespace) -> bool:
    STATE.mkdir(exist_ok=True)
    passed = report(STATE, options.parts or list(PARTS), options.gpu)
    print((STATE / "gpu.md").read_text(encoding="utf-8"))
    return passed


def _all(options: argparse.Namespace) -> bool:
    passed = _install(options) and _run(options)
    return _report(options) and passed


def _tell(result: Result) -> None:
    result.write(STATE)
    print(f"{result.part}: {result.outcome}, {result.seconds} s. {result.why}".rstrip(), flush=True)
    for line in [*result.leftovers, *result.last_lines]:
        print(f"    {line}")
    if result.part == "install" and isinstance(result.figures, dict):
        print(f"    {', '.join(f'{k} {v}' for k, v in result.figures.items())}")


def _python(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument(
        "--gpu", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses it (default: cuda)"
    )
    bound = argparse.ArgumentParser(add_help=False)
    bound.add_argument(
        "--part-timeout",
        type=float,
        default=480.0,
        metavar="SECONDS",
        help="a part that takes longer is ended and has failed (default: 480)",
    )
    parts = argparse.ArgumentParser(add_help=False)
    parts.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    quick = argparse.ArgumentParser(add_help=False)
    quick.add_argument(
        "--quick", action="store_true", help="the benchmarks' short form; the report says so"
    )
    quick.add_argument(
        "--pytest",
        action="append",
        default=[],
        metavar="OPTION",
        help="for pytest",
    )
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument("--wheels", type=Path, required=True, metavar="FOLDER")

    one = commands.add_parser("wheels", parents=[device], help="fetch the wheels a host lacks")
    one.add_argument("folder", type=Path)
    one.add_argument(
        "--host-packages",
        type=Path,
        metavar="FILE",
        help="what the host's Python has, as its `pip freeze` or a name a line",
    )
    here = Target.here()
    one.add_argument(
        "--python",
        type=_python,
        default=here.python,
        metavar="3.N",
        help="the host's (default: this)",
    )
    one.add_argument(
        "--glibc", type=int, default=here.glibc, metavar="N", help="the host's, 39 for 2.39"
    )
    one.set_defaults(do=_wheels)

    two = commands.add_parser("split", help="cut a folder of wheels into pieces")
    two.add_argument("folder", type=Path)
    two.add_argument("pieces", type=Path)
    two.add_argument("--size", type=int, default=60, metavar="MIB", help="of a piece (default: 60)")
    two.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="GLOB",
        help="files inside the wheels that the host's device does not use",
    )
    two.set_defaults(do=_split)

    three = commands.add_parser("join", help="put the pieces together again")
    three.add_argument("pieces", type=Path)
    three.add_argument("folder", type=Path)
    three.set_defaults(do=_join)

    for name, parents, do, text in (
        ("install", [device, bound, source], _install, "install the wheels and Tokenyard"),
        ("run", [device, bound, quick, parts], _run, "run parts; without names, all"),
        ("report", [device, parts], _report, "write .gpu/gpu.json and .gpu/gpu.md"),
        ("all", [device, bound, source, quick, parts], _all, "install, run and report"),
    ):
        commands.add_parser(name, parents=parents, help=text).set_defaults(do=do)
    return parser


if __name__ == "__main__":
    main()
