"""Command lines and environments of the processes that the files of `deploy/` start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.brokers import DEPLOY

#: `example.env`, filled in. Each user's password is its name.
FILLED = {
    line.partition("=")[0]: line.partition("=")[2]
    for line in (DEPLOY / "example.env").read_text().splitlines()
    if line and not line.startswith("#")
}
FILLED |= {name: name.partition("_")[2].lower() for name in FILLED if name.startswith("PASSWORD_")}
FILLED["MODEL"] = "org/model"


@dataclass(frozen=True, slots=True)
class Launch:
    """One process as a file of `deploy/` starts it."""

    name: str  # of the service
    argv: list[str]  # arguments of `tokenyard`, or the whole command line of another program
    env: Mapping[str, str]
    stop_s: float  # from SIGTERM to SIGKILL
    image: str = ""
    copies: int = 1
    more: Mapping[str, Any] = field(default_factory=dict)


def interpolated(text: str, values: Mapping[str, str] = FILLED) -> str:
    """Fill ``${NAME}``, ``${NAME:-default}`` and ``${NAME:?why}`` into a compose file's text."""

    def value(found: re.Match[str]) -> str:
        name, default = found["name"], found["default"]
        if values.get(name) or found["kind"] is None:
            return values.get(name, "")
        assert found["kind"] == ":-", f"{name} is not in example.env: {default}"
        return str(default)

    return re.sub(r"\$\{(?P<name>\w+)((?P<kind>:[-?])(?P<default>[^}]*))?\}", value, text)


def compose(values: Mapping[str, str] = FILLED) -> dict[str, Any]:
    """The compose file as a container engine reads it."""
    text = interpolated((DEPLOY / "compose.yaml").read_text(), values)
    found: dict[str, Any] = yaml.safe_load(text)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]  # anchors become copies


def compose_with_batches() -> dict[str, Any]:
    """Both compose files, as a container engine merges them."""
    found: dict[str, Any] = merged(
        compose(), yaml.safe_load((DEPLOY / "compose.batches.yaml").read_text())
    )
    return found


def merged(below: Any, above: Any) -> Any:
    """What stands above replaces a text, and is added to a list or a mapping."""
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {name: merged(below.get(name), one) for name, one in above.items()}
    return below + above if isinstance(below, list) and isinstance(above, list) else above


def from_compose(*, batches: bool = False) -> list[Launch]:
    """The services of Tokenyard's programs and of Redis."""
    read = compose_with_batches() if batches else compose()
    ours = ("redis", "tokenyard")
    return [
        Launch(
            name,
            one.get("command", []),
            {key: str(value) for key, value in one.get("environment", {}).items()},
            _seconds(one["stop_grace_period"]),
            one["image"],
            one.get("deploy", {}).get("replicas", 1),
            one,
        )
        for name, one in read["services"].items()
        if one["image"].startswith(ours)
    ]


def _seconds(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([sm])", text).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def manifests() -> list[dict[str, Any]]:
    """All manifests of `deploy/kubernetes`."""
    paths = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [one for path in paths for one in yaml.safe_load_all(path.read_text()) if one]


def built(folder: Path) -> list[dict[str, Any]]:
    """All manifests, as `kubectl apply -k` builds them."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed, so kustomization.yaml was not tried")
    done = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """All manifests with the component for batches, built from a copy."""
    copy = folder / "deploy"
    shutil.copytree(DEPLOY, copy)
    file = copy / "kustomization.yaml"
    text = file.read_text()
    assert "# components:" in text
    file.write_text(text.replace("# components:", "components:"))
    return built(copy)


def from_kubernetes(given: Sequence[dict[str, Any]] = ()) -> list[Launch]:
    """The containers of all pods."""
    found = []
    for one in given or manifests():
        if "template" not in one.get("spec", {}):
            continue
        pod = one["spec"]["template"]["spec"]
        for container in pod["containers"]:
            env = _environment(container)
            words = container.get("command", []) + container.get("args", [])
            argv = [_expanded(word, env) for word in words]
            stop_s, copies = pod["terminationGracePeriodSeconds"], one["spec"].get("replicas", 1)
            name = one["metadata"]["name"]
            found.append(Launch(name, argv, env, stop_s, container["image"], copies, pod))
    return found


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    env: dict[str, str] = {}
    for one in container.get("env", []):
        source = one.get("valueFrom", {})
        if "secretKeyRef" in source:
            env[one["name"]] = FILLED[source["secretKeyRef"]["key"]]
        elif "configMapKeyRef" in source:
            env[one["name"]] = FILLED[source["configMapKeyRef"]["key"]]
        elif "fieldRef" in source:
            env[one["name"]] = "pod-0"
        else:
            env[one["name"]] = _expanded(one["value"], env)
    return env


def _expanded(text: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text)


#: Users of Redis whose programs have another name.
USERS = {"board": "admin", "bridge": "gateway"}
SPECIFIERS = {"%H": "host", "%S": "/var/lib", "%C": "/var/cache"}


def from_systemd(*, batches: bool = False) -> list[Launch]:
    """The services of all units, with the environment files that the units name."""
    texts = {path.stem: path.read_text() for path in sorted(DEPLOY.glob("systemd/*.service"))}
    if batches:
        for more in DEPLOY.glob("systemd/batches/*.service.d/*.conf"):
            texts[more.parent.name.removesuffix(".service.d")] += more.read_text()
    return [_unit(name, text) for name, text in texts.items()]


def _unit(name: str, text: str) -> Launch:
    for short, long in SPECIFIERS.items():
        text = text.replace(short, long)
    settings = dict(_settings(text))
    service = name.removeprefix("tokenyard-")
    user = USERS.get(service, service)
    env = dict(pair.split("=", 1) for value in settings["Environment"] for pair in value.split())
    if user == "redis":
        env |= FILLED
    else:
        env["TOKENYARD_REDIS_URL"] = f"redis://{user}@redis:6379"
        env["TOKENYARD_REDIS_PASSWORD"] = user
    if user == "worker":
        env["TOKENYARD_WORKER_MODEL"] = FILLED["MODEL"]
    (command,), (stop_s,) = settings["ExecStart"], settings["TimeoutStopSec"]
    program, *arguments = shlex.split(command)
    argv = arguments if program == "/opt/tokenyard/bin/tokenyard" else [program, *arguments]
    return Launch(service, argv, env, float(stop_s), more=settings)


def _settings(text: str) -> Iterator[tuple[str, list[str]]]:
    pairs = re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE)
    names = {name for name, _ in pairs} | {"Environment"}
    return ((name, [value for key, value in pairs if key == name]) for name in names)


ORIGINS = {"compose": from_compose, "kubernetes": from_kubernetes, "systemd": from_systemd}


def with_batches(origin: str, folder: Path) -> list[Launch]:
    """The same with files and batches by HTTP."""
    if origin == "kubernetes":
        return from_kubernetes(kustomized(folder))
    return from_compose(batches=True) if origin == "compose" else from_systemd(batches=True)
