"""A process killed in each state, on the device: nothing lost, nothing twice, memory returned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.conftest import Figures, Occupant
from tests.gpu.device import Device
from tests.gpu.gpu_yard import PROCESSES, GpuYard, running_yard, sums
from tests.gpu.specs import bounded
from tests.support.processes import is_gone
from tests.support.servers import Server
from tests.support.streams import attempts
from tests.support.waiting import eventually
from tokenyard.protocol.wire import Request

pytestmark = [bounded(400), pytest.mark.crash]


@pytest.fixture
def yard(
    occupant: Occupant, valkey_broker: Server, device: Device, models: Path
) -> Iterator[GpuYard]:
    """The shared yard, without models in its processes and without requests."""
    found: GpuYard = occupant.take("yard", lambda: running_yard(valkey_broker.url, device, models))
    found.asked = []
    yield found
    if not found.host_program.is_running:
        return
    try:
        found.clear()
    except AssertionError:
        said = found.told()
        occupant.leave()
        pytest.fail(f"this test has left a yard that is not well: {said}", pytrace=False)


def attempts_of(yard: GpuYard, requests: list[Request]) -> set[int]:
    answers = yard.check_all()
    return set(attempts([answers[request.id] for request in requests]))


def test_streams_are_whole_and_in_pieces(yard: GpuYard, figures: Figures) -> None:
    yard.ask("red", 16, max_tokens=100)
    yard.ask("blue", 16, max_tokens=100)

    answers = yard.check_all()

    assert all(len(answer.deltas) > 10 for answer in answers.values())
    assert {info.model for info in yard.roster().values()} == {"red", "blue"}
    figures.note("yard_phases_s", {one.model: one.phases_s for one in yard.roster().values()})
    yard.check_well()


def test_a_death_while_warm_and_while_warming(yard: GpuYard) -> None:
    # Given a busy process and a warm one
    yard.flow("red", max_tokens=yard.long)
    warm = yard.pid_of("warm")

    # If the warm one is killed, and then its successor during its warm-up
    yard.kill(warm)
    successor = yard.seen("warming").pid
    yard.kill(successor)
    yard.ask("blue")

    assert yard.seen("ready", "blue", but={warm, successor})
    yard.check_well()


def test_a_death_while_loading(yard: GpuYard) -> None:
    yard.ask("red")
    loading = yard.seen("loading", "red").pid

    yard.kill(loading)
    yard.ask("red")

    # I expect the other process to load the model, and no request to go to the dead one.
    assert yard.seen("ready", "red", but={loading})
    assert attempts_of(yard, yard.asked) == {1}
    yard.check_well()


def test_a_death_while_ready_and_idle(yard: GpuYard) -> None:
    before = yard.ask("red")
    yard.check_all()
    ready = yard.pid_of("ready", "red")

    yard.kill(ready)
    yard.ask("red")

    assert yard.seen("ready", "red", but={ready})
    assert attempts_of(yard, before) == {1}
    yard.check_well()


def test_a_death_while_streaming(yard: GpuYard) -> None:
    before = yard.flow("red", 16, max_tokens=yard.long)
    ready = yard.pid_of("ready", "red")

    yard.kill(ready)
    yard.ask("red")

    # I expect another process to continue after the published tokens.
    assert yard.seen("ready", "red", but={ready})
    assert attempts_of(yard, before) == {2}
    yard.check_well()


def test_a_death_while_asleep(yard: GpuYard) -> None:
    # Given a sleeping model beside a busy one
    yard.ask("red")
    yard.check_all()
    yard.ask("blue")
    asleep = yard.seen("asleep", "red").pid
    yard.check_all()

    # If its process is killed, and the model is requested
    yard.kill(asleep)
    yard.ask("red")

    # I expect it to be loaded from its files.
    assert "weights" in yard.seen("ready", "red", but={asleep}).phases_s
    yard.check_well()


def test_a_death_while_unloading(yard: GpuYard) -> None:
    # Given a process that hangs in its unload
    before = yard.flow("red", max_tokens=yard.long)
    victim = yard.pid_of("ready", "red")
    yard.stop(victim)
    yard.ask("blue")
    assert yard.seen("unloading", "red").pid == victim

    # If it is killed
    yard.kill(victim)
    yard.ask("red")

    # I expect its requests to have been given back, and both models to be served.
    assert yard.seen("ready", "blue").pid != victim
    attempts_of(yard, before)
    yard.check_well()


def _streams(yard: GpuYard, model: str) -> tuple[list[Request], list[str]]:
    """Streams of a second or more, and the answers with which they begin, if known."""
    if model == "adder":
        return sums(model, 160)
    return yard.make(model, 16, yard.long // 2), []


@pytest.mark.parametrize("model", ["adder", "random"])
def test_a_stream_continues_as_if_nothing_had_happened(
    yard: GpuYard, figures: Figures, model: str
) -> None:
    # Given streams, and their tokens without a disturbance
    asked, right = _streams(yard, model)
    again, _ = _streams(yard, model)
    calm = yard.answer_all(asked)

    # If their process is killed
    yard.push_all(again)
    eventually(lambda: sum(yard.published(one.id) > 2 for one in again) > 3, timeout_s=yard.wait_s)
    yard.kill(yard.pid_of("ready", model))
    disturbed = yard.answers(again)

    # I expect all sums to be right, and the same tokens where a model is sure of them;
    tries = attempts(disturbed)
    assert 2 in tries
    pairs = list(zip(calm, disturbed, strict=True))
    for answer, (one, other) in zip(right, pairs, strict=False):
        assert (one.result.text or "").startswith(answer)
        length = len(answer)
        assert other.result.tokens[:length] == one.result.tokens[:length]
    # a model that is never sure may choose others in another batch.
    figures.note(
        f"resumed_{model}",
        {
            "streams": len(pairs),
            "resumed": tries.count(2),
            "equal": sum(one.result.tokens == other.result.tokens for one, other in pairs),
            "resumed_equal": sum(
                one.result.tokens == other.result.tokens
                for (one, other), tried in zip(pairs, tries, strict=True)
                if tried == 2
            ),
        },
    )
    yard.check_whole(yard.host_program, PROCESSES)
    yard.clear()
    yard.check_empty()


def test_every_warm_up_ran_its_model(yard: GpuYard) -> None:
    """Also those of the tests above, next to loads, requests and deaths on the same device."""
    said = "".join(program.log for program in yard.programs)

    assert "no model runs in the warm-up" not in said


def test_a_death_of_the_whole_host(yard: GpuYard, occupant: Occupant) -> None:
    """The processes end with the controller, and the device gets its memory back."""
    yard.ask("red")
    yard.check_all()
    pids = [one.pid for one in yard.host_program.children()]
    full = yard.used()

    yard.host_program.kill()

    eventually(lambda: all(is_gone(pid) for pid in pids), timeout_s=30.0)
    kept = full - int(yard.device.kv_cache_gib * 2**29)
    eventually(lambda: yard.device.used(pids) < kept)
    occupant.leave()
