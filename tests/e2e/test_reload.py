"""New weights for a yard on real vLLM: the adder becomes a subtractor, and an adder again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.up import Up, tokenyard
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.protocol.replies import Provenance, Result

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]

SUBTRACTOR = Path(__file__).parents[2] / "examples" / "arithmetic" / "models" / "subtractor"
GREEDY = {"max_tokens": 8, "temperature": 0.0}
#: Time for a process to import vLLM and load the model twice, on busy cores.
SUCCESSOR_S = 120.0


def pairs(count: int) -> list[tuple[int, int]]:
    """Pairs of two-digit numbers."""
    draw = random.Random(1)
    return [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(count)]


def origin(result: Result) -> Provenance:
    assert result.provenance is not None
    return result.provenance


def reload(up: Up, path: Path | str, epoch: int) -> None:
    """Run `reload`; it returns when both workers have the weights."""
    yard = ["--redis-url", up.url, "--yard", up.yard]
    reloading = ["models", "reload", "adder", "--path", str(path), "--epoch", str(epoch)]
    done = tokenyard(*yard, *reloading)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def adding_again(adder_yard: Up) -> Iterator[None]:
    """Restore the adder for other tests."""
    yield
    reload(adder_yard, "", 3)


def test_the_adder_subtracts_and_adds_again(
    adder_yard: Up, client: Client, adding_again: None
) -> None:
    # Given sums in the middle of epoch 1
    reload(adder_yard, "", 1)
    asked = pairs(60)
    before = [client.submit(f"{a}+{b}=", stream=True, **GREEDY) for a, b in asked]

    # If the weights change under them
    reload(adder_yard, SUBTRACTOR, 2)
    after = [client.submit(f"{a}-{b}=", **GREEDY) for a, b in asked]

    # I expect one result for each: right sums before the change, and all that begin later to
    # subtract,
    for (a, b), handle in zip(asked, before, strict=True):
        result = handle.result(60)
        assert result.ok
        assert origin(result).epoch == 2 or result.text == str(a + b)
    results = [handle.result(60) for handle in after]
    assert [result.text for result in results] == [str(a - b) for a, b in asked]
    assert {(origin(one).epoch, origin(one).first_epoch) for one in results} == {(2, None)}
    # also by the successor of a worker that dies.
    known = {origin(one).worker for one in results}
    psutil.Process(adder_yard.worker_pids()[0]).kill()
    said: list[Result] = []

    def is_there() -> bool:
        said.extend(client.submit("75-48=", **GREEDY).result(60) for _ in range(4))
        return not {origin(one).worker for one in said} <= known

    eventually(is_there, timeout_s=SUCCESSOR_S)
    assert {(one.text, origin(one).epoch) for one in said} == {("27", 2)}


def test_missing_or_torn_weights_leave_the_adder_unchanged(
    adder_yard: Up, client: Client, tmp_path: Path
) -> None:
    # Given a missing path, and a file with a valid header and truncated data
    reload(adder_yard, "", 3)
    whole = (SUBTRACTOR / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    yard = ["--redis-url", adder_yard.url, "--yard", adder_yard.yard]

    for path, why in ((tmp_path / "nope", "is no folder"), (tmp_path, str(tmp_path))):
        # If an operator reloads
        done = tokenyard(*yard, "models", "reload", "adder", "--path", str(path))

        # I expect one sentence, and the adder to add in the previous epoch.
        assert done.returncode == 1, done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        assert why in line
        assert line.endswith("adder is RUNNING with its own weights in epoch 3")
        for a, b in pairs(8):
            result = client.submit(f"{a}+{b}=", **GREEDY).result(60)
            assert (result.text, origin(result).epoch) == (str(a + b), 3)
