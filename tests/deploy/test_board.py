"""The board in the files of `deploy/`: who reaches it, as whom it logs in, and its sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.launches import ORIGINS, Launch, compose, from_systemd, manifests

#: What the board of a compose file has in common with a coordinator: the light image, and bounds.
BOUNDS = (
    "image",
    "build",
    "read_only",
    "tmpfs",
    "cap_drop",
    "security_opt",
    "mem_limit",
    "logging",
)
SANDBOX = (
    "DynamicUser", "NoNewPrivileges", "ProtectSystem", "ProtectHome", "PrivateTmp",
    "PrivateDevices", "LimitNOFILE",
)  # fmt: skip


@pytest.fixture(params=list(ORIGINS))
def launches(request: pytest.FixtureRequest) -> dict[str, Launch]:
    """The processes of each kind of file, by service."""
    return {one.name: one for one in ORIGINS[request.param]()}


def manifest(kind: str, name: str) -> Any:
    (found,) = (
        one for one in manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name)
    )
    return found["spec"]


def container(name: str) -> Any:
    (found,) = manifest("Deployment", name)["template"]["spec"]["containers"]
    return found


def test_only_the_board_logs_in_as_admin(launches: dict[str, Launch]) -> None:
    # It may do what operators may; a gateway, which faces clients, may not.
    urls = {name: one.env.get("TOKENYARD_REDIS_URL", "") for name, one in launches.items()}
    assert [name for name, url in urls.items() if url.startswith("redis://admin@")] == ["board"]
    assert launches["gateway"].env["TOKENYARD_GATEWAY_BOARD"] == "false"


def test_everybody_needs_a_key(launches: dict[str, Launch]) -> None:
    # Without one everybody who reaches it on loopback would be an admin.
    assert launches["board"].env["TOKENYARD_BOARD_KEYS"] == "required"


def test_compose_publishes_it_on_loopback_as_bounded_as_a_coordinator() -> None:
    services = compose()["services"]
    board, coordinator = services["board"], services["coordinator"]
    port = board["environment"]["TOKENYARD_BOARD_PORT"]
    assert board["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert {name: board[name] for name in BOUNDS} == {name: coordinator[name] for name in BOUNDS}
    assert board["read_only"] is True


def test_in_a_cluster_only_pods_for_operators_reach_it() -> None:
    assert not any(one["kind"] == "Ingress" for one in manifests())
    assert manifest("Service", "board")["type"] == "ClusterIP"
    (rule,) = manifest("NetworkPolicy", "board")["ingress"]
    labels = {"matchLabels": {"tokenyard/operator": "true"}}
    assert rule["from"] == [
        {"podSelector": labels},
        {"podSelector": labels, "namespaceSelector": labels},
    ]


def test_in_a_cluster_it_is_as_restricted_as_a_coordinator() -> None:
    board, coordinator = container("board"), container("coordinator")
    for name in ("image", "securityContext"):
        assert board[name] == coordinator[name]
    assert board["securityContext"]["readOnlyRootFilesystem"] is True
    assert board["resources"]["limits"] == coordinator["resources"]["limits"]


def test_its_unit_listens_on_loopback_as_restricted_as_a_coordinator() -> None:
    units = {one.name: one for one in from_systemd()}
    board, coordinator = units["board"].more, units["coordinator"].more
    assert units["board"].env["TOKENYARD_BOARD_HOST"] == "127.0.0.1"
    assert {name: board[name] for name in SANDBOX} == {name: coordinator[name] for name in SANDBOX}
