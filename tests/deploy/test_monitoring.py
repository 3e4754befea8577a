"""Prometheus's configuration, the alerts, and Grafana's board."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.deploy.launches import compose
from tests.deploy.metrics import LOAD_S, METRICS, LiveYard, asked_for, live_yard, ready, selectors
from tests.support.absence import lacks
from tests.support.brokers import DEPLOY
from tests.support.servers import Server, free_port
from tests.support.waiting import eventually

PROMETHEUS = DEPLOY / "prometheus"
ALERTS = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
BOARD = json.loads((DEPLOY / "grafana" / "tokenyard.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in BOARD["panels"]
           for target in panel["targets"]]  # fmt: skip
START_S = 30.0
PROGRAMS = ("coordinator", "worker", "gateway")
#: What this yard has not: a bridge, and a model that takes pictures.
ELSEWHERE = {
    "tokenyard_bridge_requests_total",
    "tokenyard_bridge_front_ends",
    "tokenyard_bridge_open",
    "tokenyard_media_total",
}
COMPLETED = 'tokenyard_requests_total{outcome="completed"}'
#: Counters that only grow while their coordinator or controller lives.
GROWING = (
    "tokenyard_requests_total",
    "tokenyard_tokens_total",
    "tokenyard_ttft_seconds_count",
    "tokenyard_tenant_requests_total",
    "tokenyard_tenant_tokens_total",
    "tokenyard_redeliveries_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
)


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        reason = f"{name} (Debian: prometheus) is not installed, so the metrics were not tried"
        lacks(reason)
    return found


def promtool(*arguments: object) -> None:
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_its_files() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", "--lint-fatal", PROMETHEUS / "alerts.yml")


def test_prometheus_scrapes_the_ports_of_the_services() -> None:
    jobs = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    services = compose()["services"]
    assert {job["job_name"] for job in jobs} == {f"tokenyard-{name}" for name in PROGRAMS}
    for job in jobs:
        (place,) = job["dns_sd_configs"]
        (name,) = place["names"]
        port = services[name]["environment"][f"TOKENYARD_{name.upper()}_METRICS_PORT"]
        assert (job["job_name"], str(place["port"])) == (f"tokenyard-{name}", port)


def test_only_existing_metrics_are_queried() -> None:
    asked = [asked_for(rule["expr"]) for rule in ALERTS] + [asked_for(expr) for _, expr in QUERIES]
    assert set().union(*asked) <= METRICS


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_link_to_existing_headings(rule: dict[str, Any]) -> None:
    name, _, anchor = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.*)$", (DEPLOY.parent / name).read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}
    assert not anchor or anchor in anchors
    assert rule["labels"]["severity"] in {"page", "warn"}


GOOD = {
    'up{job="tokenyard-coordinator", instance="a"}': "1+0x60",
    'tokenyard_queue_depth{queue="normal", priority="normal"}': "5+0x60",
    'tokenyard_worker_up{worker="w.1"}': "1+0x60",
    'tokenyard_queue_oldest_age_seconds{queue="normal"}': "2+0x60",
    'tokenyard_queue_oldest_age_seconds{queue="low"}': "9000+0x60",
    'tokenyard_requests_rejected_total{reason="QUEUE_FULL"}': "0+0x60",
    'tokenyard_dead_total{reason="POISONED"}': "3+0x60",
    "tokenyard_redeliveries_total": "0+1x60",
    'tokenyard_worker_lease_age_seconds{worker="w.1"}': "9+0x60",
    "tokenyard_model_swaps_total": "0+1x60",
    "tokenyard_redis_memory_ratio": "0.5+0x60",
    "tokenyard_batch_jobs_waiting": "3+0x60",
    "tokenyard_batch_workers": "1+0x60",
}
#: Series that make each alert fire.
BAD = {
    "TokenyardNoCoordinator": {'up{job="tokenyard-coordinator", instance="a"}': "0+0x60"},
    "TokenyardNoWorker": {'tokenyard_worker_up{worker="w.1"}': "0+0x60"},
    "TokenyardNoBatchWorker": {"tokenyard_batch_workers": "0+0x60"},
    "TokenyardRequestsWaitLong": {'tokenyard_queue_oldest_age_seconds{queue="normal"}': "301+0x60"},
    "TokenyardQueueFull": {'tokenyard_requests_rejected_total{reason="QUEUE_FULL"}': "0+9x60"},
    "TokenyardRequestsGivenUp": {'tokenyard_dead_total{reason="POISONED"}': "3+1x60"},
    "TokenyardWorkersDie": {"tokenyard_redeliveries_total": "0+10x60"},
    "TokenyardWorkerIsSilent": {'tokenyard_worker_lease_age_seconds{worker="w.1"}': "25+0x60"},
    "TokenyardModelsChangePlaces": {"tokenyard_model_swaps_total": "0+3x60"},
    "TokenyardRedisNearlyFull": {"tokenyard_redis_memory_ratio": "0.9+0x60"},
}


def test_each_alert_fires_for_its_fault_only(tmp_path: Path) -> None:
    # Given a healthy yard, and one for each fault
    names = [rule["alert"] for rule in ALERTS]
    assert set(names) == set(BAD)
    cases = [
        {
            "interval": "1m",
            "name": fault or "all is well",
            "input_series": [
                {"series": series, "values": values}
                for series, values in {**GOOD, **BAD.get(fault, {})}.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertstate="firing",alertname="{name}"}}) or vector(0)',
                    "eval_time": "50m",
                    "exp_samples": [{"labels": "{}", "value": int(name == fault)}],
                }
                for name in names
            ],
        }
        for fault in ("", *names)
    ]
    tests = {"rule_files": [str(PROMETHEUS / "alerts.yml")], "evaluation_interval": "1m"}
    path = tmp_path / "tests.yml"
    path.write_text(yaml.safe_dump({**tests, "tests": cases}))

    # I expect each alert for its own fault only.
    promtool("test", "rules", path)


@pytest.fixture(scope="module")
def yard(valkey_broker: Server) -> Iterator[LiveYard]:
    with live_yard(valkey_broker.url) as yard:
        yield yard


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, yard: LiveYard) -> Iterator[str]:
    """A Prometheus with the command line and files of `deploy/` that watches a live yard."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    server = program("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    places = {f"tokenyard-{name}": getattr(yard, name) for name in PROGRAMS}
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [places[job["job_name"]]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(PROMETHEUS / "alerts.yml", folder)
    mounts = {"/etc/prometheus/prometheus.yml": folder / "prometheus.yml",
              "/prometheus": folder / "data"}  # fmt: skip
    argv = [_placed(word, mounts) for word in compose()["services"]["prometheus"]["command"]]
    argv += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([server, *argv], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(START_S)


def _placed(word: str, places: dict[str, Path]) -> str:
    option, _, value = word.partition("=")
    return f"{option}={places.get(value, value)}"


def ask(api: str, path: str, **query: str) -> Any:
    try:
        with urllib.request.urlopen(
            f"{api}/{path}?{urllib.parse.urlencode(query)}", timeout=10
        ) as answer:
            return json.load(answer)["data"]
    except OSError:  # not listening yet
        return {}


def answers(api: str, query: str) -> list[float]:
    """The current values of a query."""
    found = ask(api, "query", query=query).get("result", [])
    return [float(one["value"][1]) for one in found]


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_live_yard_answers_every_query_of_board_and_alerts(
    yard: LiveYard, prometheus: str
) -> None:
    # Given a Prometheus that has watched requests end, and a worker die and return
    def has_answered(ended: int) -> bool:
        return sum(answers(prometheus, COMPLETED)) > ended

    eventually(lambda: has_answered(0), timeout_s=START_S, every_s=0.2)
    (worker,) = ready(yard.plant)
    before = sum(answers(prometheus, COMPLETED))
    psutil.Process(worker.pid).kill()
    eventually(lambda: has_answered(int(before) + 20), timeout_s=LOAD_S, every_s=0.2)

    # I expect a number for each query of the board,
    def unanswered() -> list[tuple[str, str]]:
        # No bridge is part of this deployment.
        queries = [one for one in QUERIES if not set(asked_for(one[1])) & ELSEWHERE]
        asked = [(title, query, answers(prometheus, query)) for title, query in queries]
        return [(title, query) for title, query, found in asked if all(map(math.isnan, found))]

    def all_are_answered() -> bool:
        assert unanswered() == []
        return True

    eventually(all_are_answered, timeout_s=START_S, every_s=0.5)
    # existing series for each alert,
    for rule in ALERTS:
        for selector in selectors(rule["expr"]):
            assert answers(prometheus, selector), (rule["alert"], selector)
    # no reset counter, neither Tokenyard's nor vLLM's,
    for name in GROWING:
        assert set(answers(prometheus, f"resets({name}[5m])")) == {0.0}, name

    # and every alert to be evaluated without error.
    def are_evaluated() -> bool:
        groups = ask(prometheus, "rules")["groups"]
        healths = [rule["health"] for group in groups for rule in group["rules"]]
        return len(healths) == len(ALERTS) and set(healths) == {"ok"}

    eventually(are_evaluated, timeout_s=START_S, every_s=0.2)


def test_grafana_finds_the_board_and_its_source() -> None:
    # Grafana looks where the compose file mounts the board, and queries the provisioned source.
    mounts = dict(volume.split(":")[:2] for volume in compose()["services"]["grafana"]["volumes"])
    providers = yaml.safe_load((DEPLOY / "grafana" / "boards.yml").read_text())["providers"]
    place = Path(mounts["./grafana/tokenyard.json"])
    assert str(place.parent) == providers[0]["options"]["path"]
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
