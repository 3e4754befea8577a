"""How the ranks of a group connect, and notice that another has died; without an engine."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from worker.engines import RankGroup
from worker.executor import follower as follower_module
from worker.executor import leader_link
from worker.executor.follower import FollowerLink
from worker.executor.leader_link import LeaderLink
from worker.executor.messages import (
    Build,
    Built,
    Dismissed,
    GroupError,
    Join,
    Joined,
    Left,
    RankFailed,
)

WAIT_S = 60.0
#: The time-out of a wait for what never comes.
NONE_S = 0.0


class Ranks:
    """The links of one group, all in this process."""

    def __init__(self, address: Path, size: int = 2) -> None:
        self.address = address
        devices = tuple(range(size))
        self.leader = LeaderLink(RankGroup(str(address), 0, devices))
        self.followers = [
            FollowerLink(RankGroup(str(address), rank, devices)) for rank in range(1, size)
        ]
        self._threads = ThreadPoolExecutor(size)

    def connect(self) -> list[Future[None]]:
        return [self._threads.submit(follower.connect) for follower in self.followers]

    def form(self) -> tuple[LeaderLink, FollowerLink]:
        """Connect all ranks and exchange their orders."""
        self.leader.open()
        coming = self.connect()
        self.leader.gather(WAIT_S)
        for future in coming:
            future.result(WAIT_S)
        self.leader.tell(Build(b"plan"))
        for follower in self.followers:
            assert follower.hear(Build) == Build(b"plan")
        return self.leader, self.followers[0]

    def close(self) -> None:
        for follower in self.followers:
            follower.close()
        self.leader.dismiss()
        self.leader.close()
        self._threads.shutdown()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(size: int = 2) -> Ranks:
        made.append(Ranks(tmp_path / f"group-{len(made)}", size))
        return made[-1]

    yield make
    for group in made:
        group.close()


def end_of_thread(link: LeaderLink | FollowerLink) -> None:
    assert link._thread is not None
    link._thread._thread.join(WAIT_S)


@pytest.fixture
def faults_of_threads(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Faults for which the hook of a worker process would end the process."""
    seen: list[BaseException] = []

    def hook(arguments: threading.ExceptHookArgs) -> None:
        assert arguments.exc_value is not None
        seen.append(arguments.exc_value)

    monkeypatch.setattr(threading, "excepthook", hook)
    return seen


def test_the_leader_hears_each_rank(ranks: Callable[..., Ranks]) -> None:
    group = ranks(3)
    leader, _ = group.form()

    for rank, follower in enumerate(group.followers, start=1):
        follower.say(Joined(f"queue {rank}"))

    assert leader.await_all(Joined, WAIT_S) == {1: Joined("queue 1"), 2: Joined("queue 2")}


def test_the_socket_is_removed_once_all_ranks_are_connected(ranks: Callable[..., Ranks]) -> None:
    group = ranks()

    group.form()

    assert not group.address.exists()


def test_a_follower_may_start_before_the_socket_exists(ranks: Callable[..., Ranks]) -> None:
    group = ranks()
    (coming,) = group.connect()

    group.leader.open()
    group.leader.gather(WAIT_S)

    coming.result(WAIT_S)


def test_a_rank_that_does_not_connect_is_named(ranks: Callable[..., Ranks]) -> None:
    leader = ranks(3).leader
    leader.open()

    with pytest.raises(GroupError, match="rank 1, 2 of the group did not connect within 0 s"):
        leader.gather(NONE_S)


def test_followers_without_a_leader_time_out(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "CONNECT_S", NONE_S)

    with pytest.raises(GroupError, match="nobody leads the group"):
        ranks().followers[0].connect()


def test_an_address_serves_one_group(ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    (tmp_path / "group-0").touch()

    with pytest.raises(GroupError, match="each group needs an address of its own"):
        ranks().leader.open()


def test_a_leader_that_gives_up_also_sends_late_followers_home(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_link, "LATE_S", WAIT_S)
    group = ranks()
    group.leader.open()
    dismissal = threading.Thread(target=group.leader.dismiss)
    dismissal.start()

    (coming,) = group.connect()

    coming.result(WAIT_S)
    with pytest.raises(Dismissed):
        group.followers[0].hear(Build)
    dismissal.join()


def test_a_fault_of_a_follower_reaches_the_leader(ranks: Callable[..., Ranks]) -> None:
    leader, follower = ranks().form()

    follower.say(RankFailed("OSError: no such weights"))

    with pytest.raises(GroupError, match="rank 1 of the group failed: OSError: no such weights"):
        leader.await_all(Built, WAIT_S)


def test_a_rank_that_takes_too_long_is_named(ranks: Callable[..., Ranks]) -> None:
    group = ranks(3)
    leader, first = group.form()
    first.say(Built())
    eventually(lambda: 1 in leader._last_messages)

    with pytest.raises(GroupError, match="rank 2 of the group did not get ready"):
        leader.await_all(Built, NONE_S)


def test_a_death_breaks_the_group_and_wakes_the_leader(ranks: Callable[..., Ranks]) -> None:
    leader, follower = ranks().form()
    woken = threading.Event()
    leader.when_broken(woken.set)

    follower.close()

    assert woken.wait(WAIT_S)
    with pytest.raises(GroupError, match="rank 1 of the group has died"):
        leader.check()


def test_a_death_before_the_leader_listens_wakes_it_too(ranks: Callable[..., Ranks]) -> None:
    leader, follower = ranks().form()
    follower.close()
    with pytest.raises(GroupError):
        leader.await_all(Built, WAIT_S)
    woken = threading.Event()

    leader.when_broken(woken.set)

    assert woken.is_set()


def test_the_first_reason_is_kept(ranks: Callable[..., Ranks]) -> None:
    leader, _ = ranks().form()

    leader.mark_broken("the first")
    leader.mark_broken("the second")

    with pytest.raises(GroupError, match="the first"):
        leader.check()


def test_a_leader_stuck_in_a_broken_group_raises_in_its_thread(
    ranks: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
    faults_of_threads: list[BaseException],
) -> None:
    monkeypatch.setattr(leader_link, "STUCK_S", NONE_S)
    leader, follower = ranks().form()

    with leader.inside():
        follower.close()
        end_of_thread(leader)

    assert [str(fault) for fault in faults_of_threads] == ["rank 1 of the group has died"]


def test_a_leader_that_is_not_stuck_continues(
    ranks: Callable[..., Ranks], faults_of_threads: list[BaseException]
) -> None:
    leader, follower = ranks().form()

    follower.close()
    end_of_thread(leader)

    assert faults_of_threads == []


def test_releasing_a_follower_is_no_fault(
    ranks: Callable[..., Ranks], faults_of_threads: list[BaseException]
) -> None:
    leader, follower = ranks().form()
    woken = threading.Event()
    follower.watch(woken.set)

    leader.dismiss()

    assert woken.wait(WAIT_S)
    with pytest.raises(Dismissed):
        follower.check()
    follower.say(Left())
    follower.close()
    leader.close()
    leader.check()
    assert faults_of_threads == []


def test_the_wait_for_a_follower_that_does_not_release_is_bounded(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader_link, "RELEASE_S", NONE_S)
    leader, _ = ranks().form()

    leader.dismiss()
    leader.close()

    assert "rank 1 of the group did not leave" in caplog.text


def test_a_follower_notices_the_death_of_its_leader(ranks: Callable[..., Ranks]) -> None:
    leader, follower = ranks().form()
    woken = threading.Event()
    follower.watch(woken.set)

    for line in list(leader._lines):  # the kernel does this with the sockets of a dead process
        with socket.socket(fileno=os.dup(line.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    assert woken.wait(WAIT_S)
    with pytest.raises(GroupError, match="the leader of the group has died"):
        follower.check()


def test_a_follower_stuck_in_an_ended_group_raises_in_its_thread(
    ranks: Callable[..., Ranks],
    monkeypatch: pytest.MonkeyPatch,
    faults_of_threads: list[BaseException],
) -> None:
    monkeypatch.setattr(follower_module, "STUCK_S", NONE_S)
    leader, follower = ranks().form()
    follower.watch(lambda: None)

    leader.dismiss()
    end_of_thread(follower)

    (fault,) = faults_of_threads
    assert "still inside vLLM" in str(fault)


def test_the_wait_of_a_follower_for_its_next_order_is_bounded(
    ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, follower = ranks().form()
    monkeypatch.setattr(follower_module, "MESSAGE_S", NONE_S)

    with pytest.raises(GroupError, match="sent nothing for 0 s"):
        follower.hear(Join)


def test_closing_twice_equals_closing_once(ranks: Callable[..., Ranks]) -> None:
    group = ranks()
    leader, follower = group.form()

    follower.close()
    follower.close()
    leader.close()
    leader.close()
