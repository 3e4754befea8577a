"""What probes hear of a program's main loop."""

from __future__ import annotations

from tests.support.fake_clock import FakeClock
from tokenyard.telemetry.health import Health


def test_a_program_whose_loop_has_not_turned_yet_is_neither_live_nor_ready() -> None:
    health = Health(60.0)
    assert health.not_live == health.not_ready == "it is starting"


def test_a_loop_that_turns_is_live_and_one_that_stands_still_is_not(fake_clock: FakeClock) -> None:
    health = Health(60.0)
    health.turned()
    fake_clock.advance(60.0)
    assert (health.not_live, health.not_ready) == ("", "")
    fake_clock.advance(1.0)
    assert health.not_live == health.not_ready == "no progress for 61 s"
    health.turned()
    assert health.not_live == ""


def test_a_program_that_cannot_do_its_job_is_live_and_not_ready() -> None:
    health = Health(60.0)
    health.turned("no usable broker")
    assert (health.not_live, health.not_ready) == ("", "no usable broker")
    health.turned()
    assert health.not_ready == ""


def test_a_program_that_stops_in_order_may_take_its_time(fake_clock: FakeClock) -> None:
    # Given a worker host that drains for ten minutes, I expect that no probe has it killed.
    health = Health(60.0)
    health.turned()
    health.stopping()
    fake_clock.advance(600.0)
    assert (health.not_live, health.not_ready) == ("", "it is stopping")


def test_a_program_without_one_of_its_background_tasks_is_not_live() -> None:
    health, faults = Health(60.0), ["", ""]
    health.watch(lambda: faults[0], lambda: faults[1])
    health.turned()
    assert health.not_live == ""
    faults[1] = "reading replies has ended"
    assert health.not_live == health.not_ready == health.lost == "reading replies has ended"
