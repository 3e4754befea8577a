"""The search for a request that kills engines, under any schedule of poison and chance.

A yard of one model in miniature: the decisions are the coordinator's own (`make_plan`,
`CrashAnalysis`, `History`), the engines are simulated. A request is given up only after two crashes
while it ran alone; an innocent one completes unless two chance crashes met it alone; every poison
that kills by itself is found; and the search ends.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.dispatch.admission import History
from coordinator.dispatch.plan import make_plan
from coordinator.routing.lanes import Lanes
from coordinator.routing.policies import Lane, Pick
from coordinator.routing.queued_request import QueuedRequest
from coordinator.routing.suspicion import KEPT, UNMARKED, CrashAnalysis, QuarantineMark, read_mark
from tests.support.effort import examples
from tokenyard.protocol.settings import CoordinatorSettings

LIMITS = CoordinatorSettings(redis_url="redis://x")
PLACES = 8
STEPS = 12  # of a whole answer
PAST = 2  # steps after which a member of a group on trial has survived


@dataclass
class Job:
    """A request; a poison kills its engine at a step, or only where it has company."""

    name: str
    kills_at: int = -1
    needs_company: bool = False
    steps: int = 0  # published
    begun: int = 0  # of this attempt
    patience: int = PAST
    history: History = field(default_factory=History)
    ended: str = ""
    chance_alone: int = 0  # chance crashes that it met while it ran alone

    def kills(self, company: int) -> bool:
        is_there = self.kills_at >= 0 and self.steps >= self.kills_at
        return is_there and (company > 0 or not self.needs_company)

    def suffer(self, trial: int, *, alone: bool) -> None:
        """As `rescue` writes it."""
        before = self.history
        if before.suspected and before.trial is None:
            self.patience *= 2
        self.history = History(
            crashes=before.crashes + 1,
            suspected=before.suspected + 1,
            crashed_alone=before.crashed_alone + alone,
            trial=trial,
        )


@dataclass
class Worker:
    """A lane and its mark."""

    lane: list[tuple[str, Job]] = field(default_factory=list)
    mark: QuarantineMark = UNMARKED


class Search(RuleBasedStateMachine):
    """Steps of engines, crashes by chance, turns of the coordinator, in any order."""

    @initialize(
        count=st.integers(1, 24),
        poisons=st.lists(
            st.tuples(st.integers(0, 23), st.integers(0, STEPS - 1), st.booleans()), max_size=3
        ),
        workers=st.integers(1, 4),
    )
    def begin(self, count: int, poisons: list[tuple[int, int, bool]], workers: int) -> None:
        self.jobs = [Job(f"j{n}") for n in range(count)]
        for at, step, needs_company in poisons:
            job = self.jobs[at % count]
            job.kills_at, job.needs_company = step, needs_company
        self.workers = {f"w{n}": Worker() for n in range(workers)}
        self.queued = list(self.jobs)
        self.entries = itertools.count(1)
        self.crashes = 0

    @rule()
    def turn(self) -> None:
        """The coordinator: give up, acquit, place."""
        for job in list(self.queued):
            if job.history.failure(LIMITS, 1):
                job.ended = "POISONED"
                self.queued.remove(job)
        self._acquit()
        known = {job.name: job for job in self.queued}
        asked = [
            QueuedRequest(
                intake="retry", entry=j.name, id=j.name, trial=j.history.trial_size(LIMITS)
            )
            for j in self.queued
        ]
        plan = make_plan(
            [one for one in asked if one.is_suspect],
            [one for one in asked if not one.is_suspect],
            Lanes(self._lane(name, worker) for name, worker in self.workers.items()),
            choose=lambda _, lanes: ((lane := lanes.next_open("")) and Pick(lane, "")) or None,
            most=100,
        )
        groups: dict[str, list[str]] = {}
        for placed in plan:
            worker, job = self.workers[placed.lane.name], known[placed.queued.id]
            entry = f"{next(self.entries)}-0"
            assert not placed.alone or not worker.lane, "alone is alone"
            assert worker.mark.is_open or placed.lane.name in groups
            worker.lane.append((entry, job))
            self.queued.remove(job)
            job.begun = 0
            if placed.alone:
                worker.mark = read_mark(entry.encode())
            elif placed.on_trial:
                group = groups.setdefault(placed.lane.name, [])
                group.append(entry)
                worker.mark = read_mark(f"{group[0]}+{len(group)}".encode())
        assert all(len(worker.lane) <= PLACES for worker in self.workers.values())

    def _lane(self, name: str, worker: Worker) -> Lane:
        return Lane(
            name,
            name,
            "m",
            len(worker.lane),
            PLACES,
            not worker.mark.is_open,
            max_num_seqs=PLACES,
            is_kept=worker.mark.is_kept,
        )

    def _acquit(self) -> None:
        """As `TrialMonitor` does it."""
        for worker in self.workers.values():
            if not worker.lane and not worker.mark.is_group:
                worker.mark = UNMARKED
            on_trial = [job for entry, job in worker.lane if worker.mark.covers(entry)]
            if not worker.mark.is_group or any(j.begun < j.patience for j in on_trial):
                continue
            for job in on_trial:
                job.history = History(
                    crashes=job.history.crashes,
                    suspected=job.history.suspected,
                    crashed_alone=job.history.crashed_alone,
                )
            is_needed = any(job.history.trial is not None for job in self.queued)
            worker.mark = read_mark(KEPT.encode()) if is_needed else UNMARKED

    @rule(at=st.integers(0, 3))
    def step(self, at: int) -> None:
        """An engine makes a step, or a poison in its batch kills it."""
        worker = list(self.workers.values())[at % len(self.workers)]
        if any(job.kills(len(worker.lane) - 1) for _, job in worker.lane):
            self._crash(worker)
            return
        for entry, job in list(worker.lane):
            job.steps, job.begun = job.steps + 1, job.begun + 1
            if job.steps >= STEPS:
                job.ended = "completed"
                worker.lane.remove((entry, job))

    @rule(at=st.integers(0, 3))
    def crash_by_chance(self, at: int) -> None:
        """A crash by chance."""
        worker = list(self.workers.values())[at % len(self.workers)]
        for entry, job in worker.lane:
            job.chance_alone += not worker.mark.is_group and worker.mark.covers(entry)
        self._crash(worker)

    @rule(at=st.integers(0, 3))
    def host_dies(self, at: int) -> None:
        """A kill from outside: no group is split by that."""
        worker = list(self.workers.values())[at % len(self.workers)]
        sizes = [job.history.trial for _, job in worker.lane]
        jobs = [job for _, job in worker.lane]
        self._give_back(worker)
        assert [job.history.trial for job in jobs] == sizes

    def _crash(self, worker: Worker) -> None:
        inquest = CrashAnalysis(worker.mark, length=len(worker.lane), max_num_seqs=PLACES)
        trials = inquest.trials([entry for entry, _ in worker.lane])
        for (entry, job), trial in zip(worker.lane, trials, strict=True):
            if trial is not None:
                alone = not worker.mark.is_group and worker.mark.covers(entry)
                job.suffer(trial, alone=alone)
        self.crashes += bool(worker.lane)
        self._give_back(worker)

    def _give_back(self, worker: Worker) -> None:
        self.queued += [job for _, job in worker.lane]
        worker.lane, worker.mark = [], UNMARKED

    @invariant()
    @precondition(lambda self: hasattr(self, "jobs"))
    def nobody_is_lost_or_convicted_by_chance(self) -> None:
        on_lanes = [job for worker in self.workers.values() for _, job in worker.lane]
        open_jobs = [job for job in self.jobs if not job.ended]
        assert sorted(j.name for j in on_lanes + self.queued) == sorted(j.name for j in open_jobs)
        for job in self.jobs:
            kills_alone = job.kills_at >= 0 and not job.needs_company
            if job.ended == "POISONED" and not kills_alone:
                assert job.chance_alone >= LIMITS.max_crashed_alone

    def teardown(self) -> None:
        """Let go of chance: all must end, the poisons as found, the others completed."""
        if not hasattr(self, "jobs"):
            return
        for _ in range(4000):
            if all(job.ended for job in self.jobs):
                break
            self.turn()
            for at in range(len(self.workers)):
                self.step(at)
        self.nobody_is_lost_or_convicted_by_chance()
        assert all(job.ended for job in self.jobs), [j for j in self.jobs if not j.ended]
        for job in self.jobs:
            if job.kills_at >= 0 and not job.needs_company:
                assert job.ended == "POISONED"
            elif job.chance_alone < LIMITS.max_crashed_alone:
                assert job.ended == "completed"


TestSearch = Search.TestCase
TestSearch.settings = settings(
    max_examples=examples(50, deep=600), stateful_step_count=40, deadline=None
)
