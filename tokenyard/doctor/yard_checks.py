"""Whether a yard works: who leads, who serves, and what lies where nobody comes by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from tokenyard.admin.history import Look
from tokenyard.admin.pauses import all_pauses
from tokenyard.admin.snapshot import WorkerView
from tokenyard.doctor.broker_checks import Check
from tokenyard.doctor.evidence import Evidence
from tokenyard.doctor.finding import Finding, fault, ok, unknown, warning
from tokenyard.protocol.control import ALL
from tokenyard.protocol.keys import CONSUMER, GROUP
from tokenyard.protocol.wire import WIRE_VERSION

_SKEW_MS: Final = 1000
_RECENT_MS: Final = 3_600_000
_MOST_NAMED: Final = 5
LookCheck = Callable[[Look], Iterator[Finding]]


def check_leader(look: Look) -> Iterator[Finding]:
    """Whether somebody dispatches, and speaks our protocol."""
    leader = look.view.leader
    if leader is None:
        todo = "Start `tokenyard coordinator`, better two of them."
        if look.view.broker_error:
            todo = "Mend the broker first: nobody can lead while it takes no writes."
        yield fault("coordinator", "nobody leads: nothing is dispatched", todo)
        return
    protocol = look.view.handshake.get("protocol", "")
    if protocol != str(WIRE_VERSION):
        found = f"{leader.name} speaks version {protocol or 'none'} of the protocol, not ours"
        yield fault("coordinator", found, f"Ours is {WIRE_VERSION}: use one release everywhere.")
    else:
        yield ok("coordinator", f"{leader.name} leads, epoch {leader.epoch}")


def check_workers(look: Look) -> Iterator[Finding]:
    """Whether anybody can serve."""
    view = look.view
    may_load = any(host.models for host in view.hosts)
    found = f"{view.ready_workers} of {len(view.workers)} are ready"
    if view.ready_workers or (may_load and not look.waiting):
        yield ok("workers", found)
    elif may_load and any(one.state in {"warm", "loading"} for one in view.workers):
        found = f"none is ready, and {look.waiting} requests wait"
        yield warning("workers", found, "A model may be on its way: `tokenyard top` shows it.")
    else:
        yield fault("workers", "none is ready", "Start `tokenyard worker`, or look at its log.")
    for worker in view.workers:
        yield from _worker(worker, look)


def _worker(worker: WorkerView, look: Look) -> Iterator[Finding]:
    info = worker.info
    if worker.state == "failed":
        why = info.last_error if info else ""
        todo = "Look into the log of its controller, which says once why and what to do."
        yield fault("workers", f"{worker.worker} dies again and again: {why}", todo)
    elif worker.state == "unreadable":
        todo = "It may be of another release: use one everywhere."
        yield warning("workers", f"the roster entry of {worker.worker} cannot be read", todo)
    elif info and info.last_error and look.at_ms - info.last_error_ms < _RECENT_MS:
        ago_s = max(0, look.at_ms - info.last_error_ms) // 1000
        todo = "Look into its log if it happens again."
        yield warning("workers", f"{info.name}, {ago_s:,} s ago: {info.last_error}", todo)


def check_worker_clocks(look: Look) -> Iterator[Finding]:
    """Whether workers live in the future; one that is behind cannot be seen."""
    ahead = {}
    for worker in look.view.workers:
        if worker.info:
            told = max(worker.info.since_ms, worker.info.started_ms, worker.info.last_error_ms)
            if told - look.at_ms > _SKEW_MS:
                ahead[worker.info.host or worker.worker] = told - look.at_ms
    for host, ms in ahead.items():
        found = f"the clock of {host} is {ms / 1000:.1f} s ahead of the server's"
        yield warning("clocks of workers", found, "Let NTP set it: models are placed by it.")
    if not ahead:
        yield ok("clocks of workers", "none is ahead of the server")


def check_versions(look: Look) -> Iterator[Finding]:
    """Whether the workers of a model run the same engine and the same weights."""
    engines: dict[str, set[str]] = defaultdict(set)
    for worker in look.view.workers:
        info = worker.info
        if info and info.model and info.engine:
            weights = f" {info.weights}" if info.weights else ""
            version = f"{info.engine} {info.engine_version}, revision {info.revision or '-'}"
            engines[info.model].add(version + weights)
    mixed = {model: found for model, found in engines.items() if len(found) > 1}
    for model, found in mixed.items():
        listed = " and ".join(sorted(found))
        todo = "Finish the rolling upgrade: a request that moves may get other tokens."
        yield warning("versions", f"{model} is served by {listed}", todo)
    if not mixed:
        yield ok("versions", "each model is served by one version")


def check_models(look: Look) -> Iterator[Finding]:
    """Models that could not be loaded, and scopes that are held back."""
    faults = [(host.name, model) for host in look.view.hosts for model in host.models]
    bad = [(host, model) for host, model in faults if model.fault]
    for host, model in bad:
        found = f"{model.name} could not be loaded on {host}, {model.faults} times: {model.fault}"
        say = warning if look.view.models.get(model.name) else fault
        yield say("models", found, "Mend it or its entry, and start the controller again.")
    if not bad:
        serving = ", ".join(look.view.models) or "none is loaded"
        yield ok("models", serving)


def check_postures(look: Look) -> Iterator[Finding]:
    """Scopes that operators have paused or suspended, perhaps long ago."""
    held = all_pauses(look.view.desired_states)
    for pause in held:
        first = "tokenyard resume and then " if pause.run_state == "SUSPENDED" else ""
        kind, _, name = pause.scope.partition(":")
        options = "" if pause.scope == ALL else f" --{kind} {name}"
        todo = f"If that is over: {first}tokenyard unpause{options}"
        found = f"{pause.scope} is {pause.run_state}{pause.detail(look.at_ms)}"
        yield warning("desired_states", found, todo)
    if not held:
        yield ok("desired_states", "nothing is paused")


def check_leases(look: Look) -> Iterator[Finding]:
    """Workers that are gone and whose requests nobody has taken back."""
    left = [one for one in look.view.workers if one.state in {"lost", "left"} and one.lane]
    for worker in left:
        todo = "The coordinator takes them back within seconds; if not, look into its log."
        if look.view.leader is None:
            todo = "A coordinator takes them back: start one."
        yield warning(
            "leases", f"{worker.lane} requests on the lane of {worker.worker}, gone", todo
        )
    if not left:
        yield ok("leases", f"{sum(one.lease_ms > 0 for one in look.view.workers)} run")


def check_dead(look: Look) -> Iterator[Finding]:
    """Requests that were given up."""
    if look.view.dead:
        last = look.letters[0].reason if look.letters else ""
        found = f"{look.view.dead:,}, the last: {last}"
        todo = "tokenyard dead list; then dead requeue, or dead drop."
        yield warning("dead letters", found, todo)
    else:
        yield ok("dead letters", "none")


def check_lanes(evidence: Evidence) -> Iterator[Finding]:
    """Lanes that belong to nobody."""
    if evidence.look is None:
        return
    if evidence.sample is None:
        yield unknown("lanes", "without SCAN, lanes that belong to nobody cannot be seen")
        return
    known = {worker.worker for worker in evidence.look.view.workers}
    strays = {worker: n for worker, n in evidence.sample.lanes.items() if worker not in known}
    held = {worker: n for worker, n in strays.items() if n}
    if held:
        listed = ", ".join(f"{worker} ({n})" for worker, n in sorted(held.items())[:_MOST_NAMED])
        todo = "Nobody will run these: submit them again under other ids, and report it."
        yield fault("lanes", f"requests lie on lanes without a worker: {listed}", todo)
    else:
        yield ok("lanes", f"{len(evidence.sample.lanes)}, each with its worker")


def check_groups(evidence: Evidence) -> Iterator[Finding]:
    """Consumer groups and consumers that are not the coordinator's."""
    if evidence.groups is None:
        why = evidence.unseen.get("XINFO GROUPS", "")
        yield unknown("groups", f"the consumer groups cannot be seen: {why}")
        return
    stale = 0
    for group in evidence.groups:
        stream = group.stream.rpartition("}:")[2]
        if group.name != GROUP:
            stale += 1
            found = f"{stream} has a group {group.name!r} that is not ours, {group.pending} pending"
            yield warning("groups", found, f"XGROUP DESTROY {group.stream} {group.name}")
            continue
        for consumer, pending in group.consumers.items():
            if consumer != CONSUMER:
                stale += 1
                found = f"{pending} entries of {stream} are pending for {consumer!r}, not ours"
                todo = f"XGROUP DELCONSUMER {group.stream} {GROUP} {consumer}, if it is gone"
                yield warning("groups", found, todo)
    if not stale:
        pending = sum(group.pending for group in evidence.groups)
        yield ok("groups", f"{len(evidence.groups)} of the coordinator, {pending:,} pending")


def _of_look(check: LookCheck) -> Check:
    """A check of what is seen of the yard; without that it has nothing to say."""

    def run(evidence: Evidence) -> Iterator[Finding]:
        if evidence.look is not None:
            yield from check(evidence.look)

    return run


YARD_CHECKS: Final[tuple[Check, ...]] = (
    _of_look(check_leader),
    _of_look(check_workers),
    _of_look(check_worker_clocks),
    _of_look(check_versions),
    _of_look(check_models),
    _of_look(check_postures),
    _of_look(check_leases),
    check_lanes,
    check_groups,
    _of_look(check_dead),
)
