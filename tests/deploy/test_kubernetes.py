"""The manifests of `deploy/kubernetes`: their schemas and their references to each other."""

from __future__ import annotations

import copy
import importlib
from dataclasses import fields
from typing import Any

import pytest
import yaml

from gateway.metrics import OPEN
from tests.deploy.launches import FILLED, built, kustomized, manifests
from tests.support.absence import imported
from tests.support.brokers import DEPLOY
from tokenyard.protocol.gateway_settings import GatewaySettings
from tokenyard.protocol.http_settings import BoardSettings

SCHEMAS = "pip install --no-deps -r tests/deploy/requirements.txt"
#: The schema file of each API version: Kubernetes 1.32 and KEDA 2.16.
MODULES = {
    "v1": "cloudcoil.models.kubernetes.core.v1",
    "networking.k8s.io/v1": "cloudcoil.models.kubernetes.networking.v1",
    "apps/v1": "cloudcoil.models.kubernetes.apps.v1",
    "autoscaling/v2": "cloudcoil.models.kubernetes.autoscaling.v2",
    "policy/v1": "cloudcoil.models.kubernetes.policy.v1",
    "keda.sh/v1alpha1": "cloudcoil.models.keda.v1alpha1",
}


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def is_sound(manifest: dict[str, Any]) -> bool:
    """Whether an object survives its schema's types, which drop unknown fields."""
    imported("cloudcoil.models.keda", f"no schemas: {SCHEMAS}")
    kind = getattr(importlib.import_module(MODULES[manifest["apiVersion"]]), manifest["kind"])
    read = kind.model_validate(manifest)
    return bool(read.model_dump(by_alias=True, exclude_unset=True, mode="json") == manifest)


@pytest.mark.parametrize("manifest", manifests(), ids=name_of)
def test_manifests_follow_their_schemas(manifest: dict[str, Any]) -> None:
    assert is_sound(manifest)


def test_an_unknown_field_is_found() -> None:
    # Given a manifest with a misspelt nested field, I expect the check to find it.
    (spoilt,) = (copy.deepcopy(one) for one in manifests() if name_of(one) == "Deployment worker")
    container = spoilt["spec"]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    assert not is_sound(spoilt)


def pods() -> dict[str, dict[str, Any]]:
    found = manifests()
    return {one["metadata"]["name"]: one["spec"]["template"] for one in found
            if "template" in one.get("spec", {})}  # fmt: skip


def containers() -> dict[str, dict[str, Any]]:
    return {one["name"]: one for pod in pods().values() for one in pod["spec"]["containers"]}


def kustomization() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def with_batches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All manifests with the component for batches, by their names."""
    return {name_of(one): one for one in kustomized(tmp_path_factory.mktemp("built"))}


def test_manifests_with_batches_follow_their_schemas(
    with_batches: dict[str, dict[str, Any]],
) -> None:
    assert [name for name, one in with_batches.items() if not is_sound(one)] == []


def test_with_batches_gateway_and_worker_have_one_folder_and_one_front_end(
    with_batches: dict[str, dict[str, Any]],
) -> None:
    redis, gateway, batch = (
        with_batches[name]["spec"]["template"]["spec"]
        for name in ("StatefulSet redis", "Deployment gateway", "Deployment batch")
    )
    env = {one["name"]: one.get("value") for one in gateway["containers"][0]["env"]}
    assert {"name": "GATEWAY_BATCHES", "value": "on"} in redis["containers"][0]["env"]
    claims = set()
    for pod in (gateway, batch):
        (container,) = pod["containers"]
        paths = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        name = paths[env["TOKENYARD_GATEWAY_FILES_DIR"]]
        (volume,) = (one for one in pod["volumes"] if one["name"] == name)
        claims.add(volume["persistentVolumeClaim"]["claimName"])
        assert pod["securityContext"] == gateway["securityContext"]
        assert container["securityContext"] == gateway["containers"][0]["securityContext"]
        assert pod["automountServiceAccountToken"] is False
    (claim,) = claims
    modes = with_batches[f"PersistentVolumeClaim {claim}"]["spec"]["accessModes"]
    assert modes == ["ReadWriteMany"]
    assert batch["containers"][0]["image"] == gateway["containers"][0]["image"]
    # Its network policy lets it reach Redis, and that of Redis lets it in.
    (ours,) = with_batches["NetworkPolicy redis"]["spec"]["ingress"][0]["from"][0]["podSelector"][
        "matchExpressions"
    ]
    labels = with_batches["Deployment batch"]["spec"]["template"]["metadata"]["labels"]
    assert labels["app"] in ours["values"]
    assert with_batches["NetworkPolicy batch"]["spec"]["podSelector"]["matchLabels"] == labels


def test_selectors_find_their_pods() -> None:
    labels = [pod["metadata"]["labels"] for pod in pods().values()]
    for one in manifests():
        selector = one.get("spec", {}).get("selector", {})
        wanted = selector.get("matchLabels", selector)
        if wanted:
            assert wanted in labels, name_of(one)


def test_references_of_pods_exist() -> None:
    secrets = set(FILLED)
    for name, pod in pods().items():
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])} | {"data"}
        for container in pod["spec"]["containers"]:
            for one in container.get("env", []):
                key = one.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
                assert key is None or key in secrets, (name, key)
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes


def test_pods_keep_to_the_restricted_standard() -> None:
    # Given a namespace that enforces the standard
    (namespace,) = (one for one in manifests() if one["kind"] == "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"

    # I expect all pods to meet it
    assert set(pods()) == {"redis", "coordinator", "worker", "gateway", "board"}
    for name, pod in pods().items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        kinds = {kind for volume in spec.get("volumes", []) for kind in volume} - {"name"}
        assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        # and to have no credentials of the cluster.
        assert spec["automountServiceAccountToken"] is False, name
    for name, container in containers().items():
        assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        assert not any("hostPort" in port for port in container["ports"]), name


def test_every_container_is_probed_at_a_port_that_it_serves() -> None:
    for name, container in containers().items():
        ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        for kind, path in (("startup", "livez"), ("liveness", "livez"), ("readiness", "readyz")):
            probe = container[f"{kind}Probe"]
            if name == "redis":
                assert "redis-cli ping" in probe["exec"]["command"][-1]
                continue
            # A gateway is probed where its clients ask.
            is_gateway = name == "gateway"
            expected = "health" if is_gateway and kind == "readiness" else path
            setting = "PORT" if is_gateway else "METRICS_PORT"
            assert probe["httpGet"]["path"] == f"/{expected}", (name, kind)
            env = {one["name"]: one.get("value") for one in container["env"]}
            assert ports[probe["httpGet"]["port"]] == env[f"TOKENYARD_{name.upper()}_{setting}"]


def test_each_pod_has_only_the_secrets_that_it_needs() -> None:
    held = {
        name: {
            one["valueFrom"]["secretKeyRef"]["key"]
            for one in container["env"]
            if "secretKeyRef" in one.get("valueFrom", {})
        }
        for name, container in containers().items()
    }
    assert not any("envFrom" in container for container in containers().values())
    users = (DEPLOY / "users.acl").read_text()
    assert held.pop("redis") == {
        name
        for name in FILLED
        if name.startswith("PASSWORD_") and f"user {name[9:].lower()} " in users
    } | {"CLIENTS"}
    assert held == {
        "coordinator": {"PASSWORD_COORDINATOR"},
        "worker": {"PASSWORD_WORKER"},
        "gateway": {"PASSWORD_GATEWAY"},
        "board": {"PASSWORD_ADMIN"},
    }


def test_images_are_named_in_one_place() -> None:
    # Every image has its tag in kustomization.yaml, and none in a manifest.
    images = {container["image"] for container in containers().values()}
    assert {one["name"] for one in kustomization()["images"]} == images
    assert all(one["newTag"] for one in kustomization()["images"])
    assert not any(":" in image for image in images)


def test_policies_allow_the_connections_of_the_programs() -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in manifests()
                if one["kind"] == "NetworkPolicy"}  # fmt: skip
    assert set(policies) == set(pods())
    for name, policy in policies.items():
        assert policy["policyTypes"] == ["Ingress", "Egress"], name
        (container,) = pods()[name]["spec"]["containers"]
        open_ports = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        # Probes come from the node, which policies let through.
        assert open_ports == {port["name"] for port in container["ports"]} - {"probes"}
    (to_redis,) = policies["redis"]["ingress"]
    (ours,) = to_redis["from"][0]["podSelector"]["matchExpressions"]
    callers = {name for name in policies if policies[name]["egress"]}
    assert {pods()[name]["metadata"]["labels"]["app"] for name in callers} == set(ours["values"])


def test_workers_are_scaled_by_what_a_coordinator_says() -> None:
    (scaled,) = (one for one in manifests() if one["kind"] == "ScaledObject")
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] in pods()
    (trigger,) = spec["triggers"]
    (service,) = (one for one in manifests() if name_of(one) == "Service coordinator")
    (port,) = service["spec"]["ports"]
    host = f"{service['metadata']['name']}.tokenyard.svc:{port['port']}"
    assert trigger["metadata"]["url"] == f"http://{host}/scale"
    assert spec["minReplicaCount"] == 0
    # A number of replicas in the manifest would undo KEDA's scaling.
    (worker,) = (one for one in manifests() if name_of(one) == "Deployment worker")
    assert "replicas" not in worker["spec"]


def test_gateways_are_scaled_by_a_metric_that_they_have() -> None:
    (scaled,) = (one for one in manifests() if one["kind"] == "HorizontalPodAutoscaler")
    spec = scaled["spec"]
    (gateway,) = (one for one in manifests() if name_of(one) == "Deployment gateway")
    target = spec["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"]) == (gateway["apiVersion"], gateway["kind"])
    assert target["name"] == gateway["metadata"]["name"]
    # Requests under way are a number of the moment, and two gateways are always there.
    names = [one["pods"]["metric"]["name"] for one in spec["metrics"]]
    assert names == [OPEN.name]
    assert OPEN.kind == "gauge"
    assert spec["minReplicas"] == 2
    assert "replicas" not in gateway["spec"]


@pytest.mark.parametrize(
    ("name", "setting"),
    [("gateway", "PORT"), ("board", "PORT"), ("coordinator", "METRICS_PORT")],
)
def test_the_service_leads_to_the_port_where_the_program_serves(name: str, setting: str) -> None:
    (service,) = (one for one in manifests() if name_of(one) == f"Service {name}")
    assert service["spec"]["selector"] == pods()[name]["metadata"]["labels"]
    (port,) = service["spec"]["ports"]
    container = containers()[name]
    served = {one["name"]: str(one["containerPort"]) for one in container["ports"]}
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert served[port["targetPort"]] == env[f"TOKENYARD_{name.upper()}_{setting}"]


def test_a_gateway_leaves_the_service_before_it_takes_nothing_new() -> None:
    pod = pods()["gateway"]["spec"]
    (container,) = pod["containers"]
    program, hook_s = container["lifecycle"]["preStop"]["exec"]["command"]
    probe = container["readinessProbe"]
    assert program == "sleep"
    assert float(hook_s) > probe["periodSeconds"]
    # The hook counts towards the time after which the pod is killed.
    env = {one["name"]: one.get("value") for one in container["env"]}
    grace_s = float(env["TOKENYARD_GATEWAY_GRACE_S"])
    assert pod["terminationGracePeriodSeconds"] >= float(hook_s) + grace_s + 15


@pytest.mark.parametrize("settings", [GatewaySettings, BoardSettings])
def test_the_settings_of_a_manifest_exist(
    settings: type[GatewaySettings | BoardSettings],
) -> None:
    name = settings.__name__.removesuffix("Settings").lower()
    prefix = f"TOKENYARD_{name.upper()}_"
    names = {prefix + one.name.upper() for one in fields(settings)}
    given = {one["name"] for one in containers()[name]["env"]}
    assert {one for one in given if one.startswith(prefix)} <= names


def test_kustomize_builds_one_namespace() -> None:
    # If the folder is built as by `kubectl apply -k`,
    found = {name_of(one): one for one in built(DEPLOY)}

    # I expect all manifests in one namespace, the files of Redis in a mounted map,
    assert {name_of(one) for one in manifests()} < set(found)
    namespaced = [one for one in found.values() if one["kind"] != "Namespace"]
    assert {one["metadata"]["namespace"] for one in namespaced} == {"tokenyard"}
    maps = {tuple(one["data"]): one["metadata"]["name"] for one in found.values()
            if one["kind"] == "ConfigMap"}  # fmt: skip
    pod = found["StatefulSet redis"]["spec"]["template"]["spec"]
    mounted = pod["volumes"][0]["configMap"]["name"]
    assert mounted == maps["redis.conf", "start-redis.sh", "users.acl"]
    # the name of the model in another,
    worker = found["Deployment worker"]["spec"]["template"]["spec"]["containers"][0]
    named = [one["valueFrom"]["configMapKeyRef"] for one in worker["env"]
             if "configMapKeyRef" in one.get("valueFrom", {})]  # fmt: skip
    assert named == [{"name": maps["MODEL",], "key": "MODEL"}]
    # and images with their tags.
    assert pod["containers"][0]["image"] == "redis:7.2"
    assert worker["image"] == "tokenyard-worker:0.1.0"
