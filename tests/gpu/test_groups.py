"""Two devices that serve one model; on one GPU, the refusal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.sums import questions
from tests.gpu.conftest import Occupant
from tests.gpu.device import Device
from tests.gpu.local import WARM_S
from tests.gpu.specs import ADDERS, adder_spec, bounded
from tests.support.up import tokenyard
from tokenyard.protocol.errors import SettingsError
from worker import WorkerController

pytestmark = bounded(240)


@pytest.fixture
def one_gpu(device: Device) -> None:
    if not device.is_gpu:
        pytest.skip("two processes may share a CPU")
    if device.count > 1:
        pytest.skip(f"{device.count} GPUs are here")


@pytest.mark.usefixtures("one_gpu", "cache_root")
def test_one_gpu_is_not_given_to_two_processes() -> None:
    controller = WorkerController(slots=2, device="cuda", devices=("0", "0"))

    with pytest.raises(SettingsError, match=r"devices|cannot be used") as refused:
        controller.start()

    print(refused.value)  # noqa: T201  # pytest shows it
    assert controller.status() == []


@pytest.mark.usefixtures("one_gpu", "cache_root")
def test_up_reports_the_possible_number_of_slots(tmp_path: Path) -> None:
    asked = ["up", "--slots", "2", "--model", str(ADDERS / "adder")]

    ended = tokenyard(*asked, "--port", "0", "--data-dir", str(tmp_path / "yard"))

    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert re.search(r"2 slots, but 1 GPU", said), said[-2000:]


def test_two_devices_together_calculate_as_one(occupant: Occupant, device: Device) -> None:
    if device.is_gpu and device.count < 2:
        pytest.skip("a group needs two GPUs, and there is one")
    occupant.leave()
    patience = device.patience * WARM_S
    asked = questions(["adder"], 100)
    spec = adder_spec(device, "adder", "float32", tensor_parallel_size=2)
    with WorkerController(slots=2, device=device.name, timeout_s=patience) as controller:
        controller.wait_warm(patience)
        before = {one.pid for one in controller.status()}

        with controller.create(spec) as engine:
            assert engine.devices == (0, 1)
            results = engine.generate([one.prompt for one in asked], temperature=0.0, max_tokens=8)

        assert [one.text for one in results] == [one.answer for one in asked]
        assert {one.pid for one in controller.status()} == before
        assert {one.state for one in controller.status()} == {"warm"}
