"""Lines of a gateway's batch that a limit refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.http.context import Ticket
from gateway.http.errors import GatewayError, of_result
from tokenyard.batch.asking import Answer, Ending, WaitsForLimit
from tokenyard.batch.opening import open_job
from tokenyard.batch.state import BatchSpec
from tokenyard.protocol.replies import ErrorInfo

COMPLETIONS = "/v1/completions"
Ask = Callable[[Any, str, dict[str, Any]], Any]


def refused(retry_after_s: float) -> GatewayError:
    return GatewayError(429, "tokens_per_day: reached", retry_after_s=retry_after_s)


def answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask, count: int = 3, last: object = None
) -> Iterator[Answer]:
    """The answers to lines with the prompts 1, 2 and so on, where ``ask`` stands for the queue."""
    from gateway.batches import asking, lines

    def line(number: int) -> str:
        body = {"prompt": str(number), **({"messages": last} if number == count else {})}
        whole = {"custom_id": f"{number}", "method": "POST", "url": COMPLETIONS, "body": body}
        return json.dumps(whole) + "\n"

    monkeypatch.setattr(lines.LineAsker, "_ask", ask)
    monkeypatch.setattr(lines, "_MOST_PAUSE_S", 0.01)
    (tmp_path / "in").write_text("".join(line(number) for number in range(1, count + 1)))
    spec = BatchSpec(
        input=str(tmp_path / "in"),
        output=str(tmp_path / "out"),
        endpoint=COMPLETIONS,
        window=count,
    )
    with open_job(spec) as job, asking._running_loop() as run:

        async def make() -> asking.FrontEndAsking:
            rules = asking.OwnRules({}, False)
            url = "redis://127.0.0.1:1"
            return asking.FrontEndAsking(url, "y", rules, no_file, job, Ending("j"))

        yield from run(make()).answers(lambda: None)


def no_file(_tenant: str, _file_id: str, _most_bytes: int) -> bytes:
    raise AssertionError


def test_a_line_that_is_nested_too_deep_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_asker: Any, _id: str, _body: dict[str, Any]) -> tuple[int, bytes]:
        return 200, b"{}"

    nested: list[Any] = []
    for _ in range(600):
        nested = [nested]
    found = dict(answers(tmp_path, monkeypatch, ask, last=nested))
    assert [found[number].error for number in (1, 2)] == [None, None]
    assert found[3].response is not None
    assert found[3].response.status_code == 400
    assert "levels deep" in str(found[3].error)


def test_a_batch_of_which_nothing_can_run_waits_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(_asker: Any, _id: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if body["prompt"] == "1":
            return 200, b"{}"
        raise refused(7200.0)

    found = answers(tmp_path, monkeypatch, ask)
    number, line = next(found)
    assert (number, line.error) == (1, None)
    with pytest.raises(WaitsForLimit, match="tokens_per_day") as waits:
        next(found)
    assert waits.value.pause_s == 300


def test_a_batch_with_a_line_under_way_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a limit that has room again once the first line is done
    refusals: list[str] = []
    is_done = asyncio.Event()

    async def ask(asker: Any, durable_id: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if body["prompt"] == "1":
            asker._asked[durable_id] = ticket = Ticket()
            ticket.accept()
            await is_done.wait()
            del asker._asked[durable_id]
        elif not is_done.is_set():
            refusals.append(body["prompt"])
            if len(refusals) >= 6:
                is_done.set()
            raise refused(7200.0)
        return 200, b"{}"

    # I expect the others to ask again and again until then.
    found = answers(tmp_path, monkeypatch, ask)
    assert sorted(number for number, _ in found) == [1, 2, 3]


def test_a_line_whose_model_cannot_be_loaded_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The queue would answer the same request with the same result again.
    asked: list[str] = []

    async def ask(_asker: Any, durable_id: str, _body: dict[str, Any]) -> tuple[int, bytes]:
        asked.append(durable_id)
        if len(asked) > 1:
            return 200, b"{}"
        raise of_result(ErrorInfo("MODEL_UNAVAILABLE", "model: m: no option 'x'"))

    [(_, line)] = answers(tmp_path, monkeypatch, ask, count=1)

    assert line.response is not None
    assert line.response.status_code == 503
    assert line.error is not None
    assert (line.error.code, line.error.message) == (
        "MODEL_UNAVAILABLE",
        "model: m: no option 'x'",
    )
