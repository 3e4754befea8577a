"""At 80 columns no list truncates a state, a pid or an id, however long the names are."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console, RenderableType

from tests.support.snapshots import make_letter, make_view, make_view_worker
from tokenyard.batch.state import Batch, BatchUsage, RequestCounts
from tokenyard.cli import dead, doctor, info, models, requests
from tokenyard.cli.batch import jobs as batch_jobs
from tokenyard.cli.shared import tables
from tokenyard.cli.shared.tables import Column, FittingTable, table_of
from tokenyard.cli.tenants import list as tenants_list
from tokenyard.protocol.control import DesiredState, DesiredStates
from tokenyard.protocol.tenants import TenantSettings
from tokenyard.protocol.worker_info import WORKER_STATES, HostInfo, ModelInfo
from tokenyard.yard.listing import RequestList
from tokenyard.yard.pauses import all_pauses
from tokenyard.yard.requests import STATES, Listed
from tokenyard.yard.snapshot import WorkerView, YardView
from tokenyard.yard.tenants import TenantView
from tokenyard.yard.timeline import Attempt, Timeline
from tokenyard.yard.usage import TenantUsage

WIDTH = 80
MODEL = "meta-llama/Llama-3.1-405B-Instruct-quantized.w8a8"
HOST = "gpu-node-0017.cluster-3.example-datacenter.internal"
PAUSE = DesiredState(run_state="PAUSED", by=f"kim@{HOST}", why="look at its driver", since_ms=1)
ELLIPSIS = "…"


def drawn(*pictures: RenderableType, width: int = WIDTH) -> str:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as capture:
        for picture in pictures:
            console.print(picture)
    text = capture.get()
    assert all(len(line) <= width for line in text.splitlines())
    assert ELLIPSIS not in text
    return text


def workers(names: list[str]) -> list[WorkerView]:
    """Workers in different states and run states, with different pids."""
    return [
        make_view_worker(
            f"{name}.{number}",
            state=WORKER_STATES[number % len(WORKER_STATES)],
            model=MODEL,
            host=HOST,
            pid=4_000_000 + number,
            lane=100 + number,
            lane_limit=320,
            memory_bytes=2**36,
            run_state="SUSPENDED" if number % 2 else "RUNNING",
            phases_s={"weights": 12.0, "profile": 3.0},
        )
        for number, name in enumerate(names)
    ]


SHORT = [f"w-{number}" for number in range(10)]
LONG = [f"{HOST}-{number}" for number in range(10)]
#: Names of the maximum length.
LONGEST = [f"{number}{'x' * 90}" for number in range(3)]


def yard(names: list[str]) -> YardView:
    fault = "no such file: /models/a/path/that/is/so/long/that/it/has/no/room/in/one/line/of/80"
    models = [ModelInfo(name=MODEL, fault=fault, faulted_ms=1, faults=2, load_s=3.0)]
    desired_states = {"all": PAUSE, f"model:{MODEL}": PAUSE, f"worker:{names[0]}": PAUSE}
    return make_view(
        workers(names),
        waiting=1_234_567,
        models={MODEL: 3},
        hosts=[HostInfo(name=HOST, models=models)],
        desired_states=DesiredStates(desired_states),
        at_ms=90_000,
    )


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("names", [SHORT, LONG])
def test_info_shows_states_and_pids_of_long_names(names: list[str], is_whole: bool) -> None:
    view = yard(names)
    text = drawn(info._picture(view, "redis://127.0.0.1:6379", is_whole=is_whole))
    for worker in view.workers:
        assert worker.info
        [at] = [n for n, line in enumerate(text.splitlines()) if line.startswith(worker.worker)]
        about = "\n".join(text.splitlines()[at : at + 5])
        assert info.state_text(worker) in about
        assert str(worker.info.pid) in about
    assert "look at its driver" in " ".join(text.split())
    assert not is_whole or "weights 12.00" in " ".join(text.split())


def test_info_wraps_names_longer_than_a_line() -> None:
    text = drawn(info._picture(yard(LONGEST), "redis://x", is_whole=False))
    whole = "".join(line.strip() for line in text.splitlines())
    assert all(f"{name}.{number}" in whole for number, name in enumerate(LONGEST))


def test_info_with_short_names_is_a_table() -> None:
    view = make_view([make_view_worker("worker-vm-1213-0.1", state="ready", pid=1305)])
    *_, head, row = drawn(info._picture(view, "redis://x", is_whole=False)).splitlines()
    assert head.split()[:5] == ["Worker", "State", "Pid", "Model", "Lane"]
    assert row.split()[:4] == ["worker-vm-1213-0.1", "ready", "1305", "adder"]


def test_info_on_a_wide_terminal_has_all_columns() -> None:
    view = make_view([make_view_worker("w.1", host="gpu", phases_s={"weights": 1.5})])
    assert "1.50 s (weights 1.50)" in drawn(
        info._picture(view, "redis://x", is_whole=False), width=140
    )


BATCH = Batch(
    id="b" * 70,
    status="in_progress",
    rq_status="started",
    request_counts=RequestCounts(2_000_000, 1_000_000, 20_000),
    usage=BatchUsage(input_tokens=12_000_000, output_tokens=345_000, total_tokens=12_345_000),
    lines_per_s=12,
    eta_s=100.0,
    input_file_id="/data/" + "input-" * 30 + ".jsonl",
    output_file_id="/data/" + "output-" * 30 + ".jsonl",
    error_file_id="/data/" + "errors-" * 30 + ".jsonl",
)
STATUSES = ["validating", "in_progress", "finalizing", "completed", "cancelling", "cancelled"]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", ["batch_0123456789abcdef0123456789abcdef", "nightly-" + "x" * 60])
def test_batch_list_shows_every_status(name: str, is_whole: bool) -> None:
    batches = [
        replace(BATCH, id=f"{name}{number}", status=status, created_at=int(time.time()) - 90)
        for number, status in enumerate(STATUSES)
    ]
    text = drawn(table_of(batches, batch_jobs._COLUMNS, has_details=is_whole))
    lines = text.splitlines()
    for number, status in enumerate(STATUSES):
        [at] = [n for n, line in enumerate(lines) if line.startswith(f"{name}{number}")]
        assert status in "\n".join(lines[at : at + 5])
    assert "1020000 of 2000000" in text
    assert ("started" in text) >= is_whole


def test_batch_status_shows_long_names_whole() -> None:
    text = drawn(batch_jobs._sheet(BATCH, ""))
    assert "b" * 70 in "".join(text.split())
    assert "in_progress" in text
    assert BATCH.output_file_id in "".join(text.split())


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("q", "ann"),
        ("2ef771e7-3b12-4b9d-bf28-95ab80f804a4", "client-062aa7b18d5c8181"),
        ("n" * 77, "c" * 60),
    ],
)
def test_requests_show_states_and_clients_of_long_names(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    client: str,
    is_whole: bool,
) -> None:
    pauses = all_pauses(yard(LONG).desired_states)
    found = [
        Listed(
            client=client,
            id=f"{name}{number}",
            state=state,
            model=MODEL,
            worker=f"{HOST}-{number}.7",
            accepted_ms=1,
            ended_ms=0 if state in {"waiting", "assigned"} else 2,
            pauses=pauses if state == "waiting" else (),
            error="" if state != "failed" else "MODEL_UNAVAILABLE",
        )
        for number, state in enumerate(STATES)
    ]
    console = Console(width=WIDTH, markup=False, highlight=False)
    monkeypatch.setattr(tables, "plain_console", lambda: console)
    requests._print(RequestList(found, 90_000), as_json=False, is_whole=is_whole)
    text = capsys.readouterr().out
    assert ELLIPSIS not in text
    lines = text.splitlines()
    for one in found:
        [at] = [n for n, line in enumerate(lines) if line.startswith(one.id)]
        about = " ".join(lines[at : at + 6])
        assert one.state in about
        assert client in about
        if is_whole:
            assert one.worker in about
    assert "waiting, PAUSED" in text
    assert "look at its driver" in text


def test_models_list_shows_each_worker_with_its_state() -> None:
    view = yard(LONG)
    views = models.model_views(view)
    text = drawn(table_of(views, models._COLUMNS))
    assert MODEL in text
    assert "PAUSED" in text
    for worker in view.workers:
        assert worker.info
        assert f"{worker.worker} {worker.info.state}" in " ".join(text.split())


def test_models_list_shows_why_a_model_cannot_be_loaded_and_whose_hosts_are_gone() -> None:
    broken, away = ModelInfo(name="broken", fault="no option 'x'", faults=2), ModelInfo(name="away")
    hosts, gone = [HostInfo(name="gpu", models=[broken])], [HostInfo(name="old", models=[away])]
    view = make_view([], hosts=hosts, gone=gone)
    listed = models.model_views(view)

    text = " ".join(drawn(table_of(listed, models._COLUMNS)).split())
    assert "away RUNNING old (not there)" in text
    assert "gpu, 2 in a row: no option 'x'" in text
    told: Any = {one.name: models._fields(one) for one in listed}
    assert (told["away"]["hosts"], len(told["away"]["gone"])) == ([], 1)
    assert (len(told["broken"]["hosts"]), told["broken"]["gone"]) == (1, [])


@pytest.mark.parametrize("name", ["team", "t" * 40, "t" * 90])
def test_tenants_show_limits_and_counts_of_long_names(name: str) -> None:
    limits = TenantSettings(weight=0.125, tokens_per_day=10**12, models=[MODEL] * 3)
    one = TenantView(
        name=name, settings=limits, waiting=1_000_000, waiting_tokens=10**12, running=12_345
    )
    other = TenantView(name="other", waiting=1)
    columns = tenants_list._columns({name: 0.111})
    listed = " ".join(drawn(table_of([one, other], columns)).split())
    shown = "".join(drawn(tenants_list._sheet(one, {name: 0.111}, {"tokens_per_day": 7})).split())
    for text in ("1,000,000", "12,345", "11.1%", "1,000,000,000,000"):
        assert text in listed
        assert text in shown
    assert name in "".join(listed.split())
    assert name in shown
    assert MODEL in shown


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", ["team", "t" * 90])
def test_usage_shows_counts_of_long_names(name: str, is_whole: bool) -> None:
    usage = TenantUsage(
        tenant=name,
        day="2026-11-23",
        model=MODEL,
        requests=10**9,
        tokens_in=10**12,
        tokens_out=10**12 + 1,
        tokens_cached=10**11,
        wait_p50_ms=512,
        wait_p99_ms=2**26,
    )
    text = drawn(table_of([usage], tenants_list._USAGE_COLUMNS, has_details=is_whole))
    assert name in "".join(text.split())
    for part in ("2026-11-23", "1,000,000,000", "1,000,000,000,001", "512 ms", "19 h"):
        assert part in " ".join(text.split())
    assert ("100,000,000,000" in text) >= is_whole


def test_dead_list_and_show_truncate_no_id() -> None:
    reason = "POISONED: " + "it killed its worker while it ran alone; " * 5
    server_id, client = "normal/1763700000000-0", "client-062aa7b18d5c8181"
    name = "2ef771e7-3b12-4b9d-bf28-95ab80f804a4"
    letter = make_letter(
        "1763700000000-0",
        reason,
        server_id=server_id,
        client=client,
        id=name,
        model=MODEL,
        fields={"prompt": "x" * 300},
    )
    listed = drawn(table_of([letter], dead._COLUMNS))
    assert "1763700000000-0" in listed
    assert f"{client}/{name}" in listed
    shown = drawn(dead._sheet(letter))
    assert server_id in shown
    assert "x" * 300 in "".join(shown.split())


def test_explain_shows_a_long_worker_name_whole() -> None:
    attempt = Attempt(
        number=1, worker=f"{HOST}-0.12", why="round_robin, " * 9, assigned_ms=2, waited_ms=1
    )
    timeline = Timeline(
        client="ann",
        id="q",
        state="waiting",
        now_ms=90_000,
        server_id="normal/1763700000000-0",
        accepted_ms=1,
        attempts=[attempt],
        waits_for=all_pauses(yard(LONG).desired_states)[0].text(90_000),
    )
    text = drawn(requests._table(timeline))
    assert f"{HOST}-0.12" in text
    assert "normal/1763700000000-0" in text
    assert f"kim@{HOST}: look at its driver" in " ".join(text.split())


def test_doctor_wraps_long_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(width=WIDTH, markup=False, highlight=False)
    monkeypatch.setattr(doctor, "plain_console", lambda: console)
    found = f"{HOST}-0.12 {'has not obeyed ' * 10}"
    doctor._print([doctor.Finding("workers", "warning", found, f"Look at {HOST}-0.12")],
                  shows_all=False)  # fmt: skip
    text = capsys.readouterr().out
    assert ELLIPSIS not in text
    assert text.count(f"{HOST}-0.12") == 2


def test_empty_columns_are_left_out() -> None:
    columns = (Column("Id", is_whole=True), Column("Epoch"), Column("Fault"))
    table = FittingTable(columns, [(("a", "-", ""), ""), (("b", "3", "-"), "")])
    assert drawn(table).split() == ["Id", "Epoch", "a", "-", "b", "3"]


def test_detail_columns_are_dropped_before_the_table_breaks() -> None:
    columns = (Column("Id", is_whole=True), *(Column(n, is_detail=True) for n in ("One", "Two")))
    table = FittingTable(columns, [(("x" * 70, "first", "second"), "")])
    text = drawn(table)
    assert "first" in text
    assert "second" not in text
    table.has_details = True
    assert drawn(table).splitlines()[1].split() == ["one", "first", "two", "second"]
