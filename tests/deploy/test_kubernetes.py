"""The manifests of `deploy/kubernetes`: their schemas, and that they fit each other."""

from __future__ import annotations

import copy
import importlib
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.launches import FILLED, manifests
from tests.support.brokers import DEPLOY
from tokenyard.keys import INTAKE_CLASSES, Keys

SCHEMAS = "pip install --no-deps -r tests/deploy/requirements.txt"
#: Where the types of each API version are: Kubernetes 1.32 and KEDA 2.16.
MODULES = {
    "v1": "cloudcoil.models.kubernetes.core.v1",
    "apps/v1": "cloudcoil.models.kubernetes.apps.v1",
    "policy/v1": "cloudcoil.models.kubernetes.policy.v1",
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
}


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def is_sound(manifest: dict[str, Any]) -> bool:
    """Whether it has the types of its schema; a field that the schema does not know is lost."""
    pytest.importorskip("cloudcoil.models.keda", reason=f"no schemas: {SCHEMAS}")
    kind = getattr(importlib.import_module(MODULES[manifest["apiVersion"]]), manifest["kind"])
    read = kind.model_validate(manifest)
    return bool(read.model_dump(by_alias=True, exclude_unset=True, mode="json") == manifest)


@pytest.mark.parametrize("manifest", manifests(), ids=name_of)
def test_manifests_follow_their_schemas(manifest: dict[str, Any]) -> None:
    assert is_sound(manifest)


def test_a_field_that_does_not_exist_is_found() -> None:
    # Given a manifest with a typing error deep inside, I expect that it is found.
    (spoilt,) = (copy.deepcopy(one) for one in manifests() if name_of(one) == "Deployment worker")
    container = spoilt["spec"]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    assert not is_sound(spoilt)


def pods() -> dict[str, dict[str, Any]]:
    found = manifests()
    return {one["metadata"]["name"]: one["spec"]["template"] for one in found
            if "template" in one["spec"]}  # fmt: skip


def test_selectors_find_their_pods() -> None:
    labels = [pod["metadata"]["labels"] for pod in pods().values()]
    for one in manifests():
        selector = one["spec"].get("selector", {})
        wanted = selector.get("matchLabels", selector)
        if wanted:
            assert wanted in labels, name_of(one)


def test_what_pods_mention_is_there() -> None:
    secrets = set(FILLED)
    for name, pod in pods().items():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | {"data"}
        for container in pod["spec"]["containers"]:
            for one in container.get("env", []):
                key = one.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
                assert key is None or key in secrets, (name, key)
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
    (trigger,) = (one for one in manifests() if one["kind"] == "TriggerAuthentication")
    assert {one["key"] for one in trigger["spec"]["secretTargetRef"]} <= secrets


def test_workers_are_scaled_by_all_that_waits() -> None:
    (scaled,) = (one for one in manifests() if one["kind"] == "ScaledObject")
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] in pods()
    # All intakes count, and where nothing waits no worker is needed.
    streams = {trigger["metadata"]["stream"] for trigger in spec["triggers"]}
    assert streams == {Keys("main").intake(name) for name in INTAKE_CLASSES}
    assert spec["minReplicaCount"] == 0
    # A number of replicas in the manifest would undo what KEDA has done.
    (worker,) = (one for one in manifests() if name_of(one) == "Deployment worker")
    assert "replicas" not in worker["spec"]


def test_kustomize_puts_all_together() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed, so kustomization.yaml was not tried")
    # If the folder is built as `kubectl apply -k` does it,
    done = subprocess.run(
        [kubectl, "kustomize", DEPLOY], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    built = {name_of(one): one for one in yaml.safe_load_all(done.stdout)}

    # I expect all manifests in one namespace, and the files of Redis in a map that it mounts.
    assert {name_of(one) for one in manifests()} < set(built)
    assert {one["metadata"]["namespace"] for one in built.values()} == {"tokenyard"}
    (files,) = (one for one in built.values() if one["kind"] == "ConfigMap")
    assert set(files["data"]) == {"redis.conf", "users.acl", "start-redis.sh"}
    volumes = built["StatefulSet redis"]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["configMap"]["name"] == files["metadata"]["name"]
