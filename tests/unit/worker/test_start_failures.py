"""How many failed starts end a host: of one kind, over all processes, while nothing works."""

from __future__ import annotations

from worker.host.diagnosis import FailedStart
from worker.host.start_failures import StartFailures

KILLED = FailedStart("warming up", "SIGKILL")
ILLEGAL = FailedStart("warming up", "SIGILL")
NO_VLLM = FailedStart("warming up", said="ModuleNotFoundError: No module named 'vllm'")
TOO_LARGE = FailedStart("loading the model", "SIGKILL", model="org/large")


def noted(*deaths: tuple[str, FailedStart], limit: int = 3) -> StartFailures:
    failures = StartFailures(limit)
    for name, death in deaths:
        failures.note(name, death)
    return failures


def ends(failures: StartFailures, *, is_pending: bool = False) -> bool | None:
    """Whether the host ends; None if there is nothing to report."""
    found = failures.enough(is_pending=is_pending)
    return found and found.is_hopeless


def test_three_deaths_of_the_same_kind_are_enough() -> None:
    failures = noted(("w", KILLED), ("w", KILLED))
    assert failures.enough(is_pending=False) is None

    failures.note("w", KILLED)
    found = failures.enough(is_pending=False)
    assert found.is_hopeless
    assert found.death.signal == "SIGKILL"


def test_deaths_are_counted_over_all_processes() -> None:
    failures = noted(("w-0", KILLED), ("w-1", KILLED), ("w-2", KILLED))
    assert failures.enough(is_pending=False)


def test_a_process_in_its_first_try_is_waited_for() -> None:
    failures = noted(("w-0", KILLED), ("w-0", KILLED), ("w-0", KILLED))
    assert failures.enough(is_pending=True) is None
    assert failures.failed == {"w-0"}
    assert failures.enough(is_pending=False)


def test_deaths_of_several_kinds_are_counted_apart() -> None:
    failures = noted(("w", KILLED), ("w", ILLEGAL), ("w", KILLED), ("w", ILLEGAL))
    assert failures.enough(is_pending=False) is None


def test_one_death_of_a_permanent_cause_is_enough() -> None:
    assert ends(noted(("w", NO_VLLM)), is_pending=True)


def test_each_kind_is_reported_once() -> None:
    failures = noted(("w", KILLED), ("w", KILLED), ("w", KILLED))
    assert failures.enough(is_pending=False)
    failures.note("w", KILLED)
    assert failures.enough(is_pending=False) is None
    for _ in range(3):
        failures.note("w", ILLEGAL)
    assert failures.enough(is_pending=False)


def test_a_host_with_a_working_process_continues() -> None:
    failures = noted(("w-0", KILLED), ("w-0", KILLED))
    failures.worked("warming up")
    failures.note("w-0", KILLED)
    assert ends(failures) is False


def test_a_warm_process_does_not_prove_that_a_model_fits() -> None:
    failures = noted(*[("w", TOO_LARGE)] * 3)
    failures.worked("warming up")
    found = failures.enough(is_pending=False)
    assert found.is_hopeless
    assert found.death.model == "org/large"

    failures = noted(*[("w", TOO_LARGE)] * 3)
    failures.worked("loading the model")
    assert ends(failures) is False
