"""Checks of a yard: leader, workers, models, lanes, tenants, and requests that lost their entry.

None is possible without a snapshot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from tokenyard.doctor.evidence import Evidence, Finding, fault, ok, unknown, warning
from tokenyard.protocol.control import ALL
from tokenyard.protocol.leader_reports import LAST, LAST_FOUND, Pass, parse_pass
from tokenyard.protocol.texts import counted, listed, span
from tokenyard.protocol.wire import WIRE_VERSION
from tokenyard.yard.history import Snapshot
from tokenyard.yard.pauses import all_pauses
from tokenyard.yard.snapshot import WorkerView
from tokenyard.yard.tenants import TenantView

_SKEW_MS: Final = 1000
_RECENT_MS: Final = 3_600_000
_MOST_NAMED: Final = 5


def check_writes(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether the server takes writes now."""
    if error := snapshot.view.broker_error:
        found, todo = error.split(". ", 1)
        yield fault("writes", f"the broker {found}", f"{todo}.")
    else:
        yield ok("writes", "the broker takes writes")


def check_leader(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether a coordinator leads, with our version of the protocol."""
    leader = snapshot.view.leader
    if leader is None:
        todo = "Start `tokenyard coordinator`, or better two."
        if snapshot.view.broker_error:
            todo = "Repair the broker first: no coordinator can lead while it takes no writes."
        yield fault("coordinator", "no coordinator leads: nothing is dispatched", todo)
        return
    protocol = snapshot.view.handshake.get("protocol", "")
    if protocol != str(WIRE_VERSION):
        found = f"{leader.name} speaks version {protocol or 'none'} of the protocol"
        yield fault(
            "coordinator", found, f"This release has {WIRE_VERSION}: use one release everywhere."
        )
    else:
        yield ok("coordinator", f"{leader.name} leads, epoch {leader.epoch}")


def check_workers(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether a worker can serve."""
    view = snapshot.view
    may_load = any(host.models for host in view.hosts)
    found = f"{view.ready_workers} of {len(view.workers)} are ready"
    if view.ready_workers or (may_load and not snapshot.waiting):
        yield ok("workers", found)
    elif may_load and any(one.state in {"warm", "loading"} for one in view.workers):
        found = f"none is ready, and {snapshot.waiting} requests wait"
        yield warning("workers", found, "A model may be loading: `tokenyard top` shows it.")
    else:
        yield fault("workers", "none is ready", "Start `tokenyard worker`, or look at its log.")
    for worker in view.workers:
        yield from _worker(worker, snapshot)


def _worker(worker: WorkerView, snapshot: Snapshot) -> Iterator[Finding]:
    info = worker.info
    if worker.state == "failed":
        why = info.last_error if info else ""
        todo = "See the log of its controller, which has the cause and the remedy."
        yield fault("workers", f"{worker.worker} crashes repeatedly: {why}", todo)
    elif worker.state == "unreadable":
        todo = "It may come from another release: use one everywhere."
        yield warning("workers", f"the roster entry of {worker.worker} cannot be read", todo)
    elif info and info.last_error and snapshot.at_ms - info.last_error_ms < _RECENT_MS:
        ago_s = max(0, snapshot.at_ms - info.last_error_ms) // 1000
        todo = "See its log if it happens again."
        yield warning("workers", f"{info.name}, {ago_s:,} s ago: {info.last_error}", todo)


def check_worker_clocks(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether the clock of a host is ahead of the server's; one behind cannot be detected."""
    ahead = {}
    for worker in snapshot.view.workers:
        if worker.info:
            told = max(worker.info.since_ms, worker.info.started_ms, worker.info.last_error_ms)
            if told - snapshot.at_ms > _SKEW_MS:
                ahead[worker.info.host or worker.worker] = told - snapshot.at_ms
    for host, ms in ahead.items():
        found = f"the clock of {host} is {ms / 1000:.1f} s ahead of the server's"
        yield warning("clocks of workers", found, "Set it by NTP: placement uses it.")
    if not ahead:
        yield ok("clocks of workers", "none is ahead of the server")


def check_versions(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether the workers of a model run the same engine and the same weights."""
    engines: dict[str, set[str]] = defaultdict(set)
    for worker in snapshot.view.workers:
        info = worker.info
        if info and info.model and info.engine:
            weights = f" {info.weights}" if info.weights else ""
            version = f"{info.engine} {info.engine_version}, revision {info.revision or '-'}"
            engines[info.model].add(version + weights)
    mixed = {model: found for model, found in engines.items() if len(found) > 1}
    for model, found in mixed.items():
        served = f"{model} is served by {' and '.join(sorted(found))}"
        todo = "Finish the rolling upgrade: a request that moves may get different tokens."
        yield warning("versions", served, todo)
    if not mixed:
        yield ok("versions", "each model is served by one version")


def check_models(snapshot: Snapshot) -> Iterator[Finding]:
    """Models that could not be loaded."""
    faults = [(host.name, model) for host in snapshot.view.hosts for model in host.models]
    bad = [(host, model) for host, model in faults if model.fault]
    for host, model in bad:
        found = f"{model.name} could not be loaded on {host}, {model.faults} times: {model.fault}"
        say = warning if snapshot.view.models.get(model.name) else fault
        yield say("models", found, "Repair it or its entry, and restart the controller.")
    if not bad:
        serving = ", ".join(snapshot.view.models) or "none is loaded"
        yield ok("models", serving)


def check_pauses(snapshot: Snapshot) -> Iterator[Finding]:
    """Scopes that operators have paused or suspended."""
    held = all_pauses(snapshot.view.desired_states)
    for pause in held:
        first = "tokenyard resume and then " if pause.run_state == "SUSPENDED" else ""
        kind, _, name = pause.scope.partition(":")
        options = "" if pause.scope == ALL else f" --{kind} {name}"
        todo = f"When it is no longer needed: {first}tokenyard unpause{options}"
        found = f"{pause.scope} is {pause.run_state}{pause.detail(snapshot.at_ms)}"
        yield warning("desired_states", found, todo)
    if not held:
        yield ok("desired_states", "nothing is paused")


def check_leases(snapshot: Snapshot) -> Iterator[Finding]:
    """Lanes of workers that are gone, with requests that were not rescued."""
    left = [one for one in snapshot.view.workers if one.state in {"lost", "left"} and one.lane]
    for worker in left:
        todo = "The coordinator takes them back within seconds; if not, see its log."
        if snapshot.view.leader is None:
            todo = "A coordinator rescues them: start one."
        yield warning(
            "leases", f"{worker.lane} requests on the lane of {worker.worker}, which is gone", todo
        )
    if not left:
        yield ok("leases", f"{sum(one.lease_ms > 0 for one in snapshot.view.workers)} held")


def check_dead(snapshot: Snapshot) -> Iterator[Finding]:
    """Whether there are dead letters."""
    if snapshot.view.dead:
        last = snapshot.letters[0].reason if snapshot.letters else ""
        found = f"{snapshot.view.dead:,}, the last: {last}"
        todo = "tokenyard dead list; then dead requeue or dead drop."
        yield warning("dead letters", found, todo)
    else:
        yield ok("dead letters", "none")


def check_lanes(snapshot: Snapshot, evidence: Evidence) -> Iterator[Finding]:
    """Lanes without a worker."""
    if evidence.sample is None:
        yield unknown("lanes", "without SCAN, lanes without a worker cannot be found")
        return
    known = {worker.worker for worker in snapshot.view.workers}
    strays = {worker: n for worker, n in evidence.sample.lanes.items() if worker not in known}
    held = {worker: n for worker, n in strays.items() if n}
    if held:
        lanes = listed([f"{worker} ({n})" for worker, n in sorted(held.items())], _MOST_NAMED)
        todo = "No worker will run these: submit them again under other ids, and report it."
        yield fault("lanes", f"requests lie on lanes without a worker: {lanes}", todo)
    else:
        yield ok("lanes", f"{len(evidence.sample.lanes)}, each with its worker")


def check_entries(snapshot: Snapshot, evidence: Evidence) -> Iterator[Finding]:
    """Requests whose entry was deleted by hand."""
    handshake, leads = snapshot.view.handshake, snapshot.view.leader is not None
    lost = evidence.lost
    if lost and lost.names:
        found = (
            f"{len(lost.names):,} of {lost.ledgers:,} requests have lost their entry:"
            f" {listed(lost.names, _MOST_NAMED)}"
        )
        todo = "The coordinator ends them as ENTRY_LOST; if not, see its log."
        if not leads:
            todo = "A coordinator ends them as ENTRY_LOST: start one."
        yield (warning if leads else fault)("entries", found, todo)
    ended = parse_pass(handshake.get(LAST_FOUND, ""))
    is_recent = ended is not None and snapshot.at_ms - ended.at_ms < _RECENT_MS
    if ended and is_recent:
        found = f"{ended.ended:,} requests ended as ENTRY_LOST{_ago(ended, snapshot.at_ms)}"
        todo = "Find the program that runs XTRIM, XDEL or XADD with MAXLEN on intakes or lanes."
        yield warning("entries", found, todo)
    if not is_recent and not (lost and lost.names):
        last = parse_pass(handshake.get(LAST, ""))
        yield _all_well(last, snapshot.at_ms, leads=leads)


def _all_well(last: Pass | None, at_ms: int, *, leads: bool) -> Finding:
    if last is None and leads:
        return unknown("entries", "the coordinator has reported no pass yet: may its user SCAN?")
    if last is None:
        return unknown("entries", "not checked: no coordinator leads")
    told = f"the coordinator checked {last.ledgers:,} ledgers in {last.took_s:.1f} s"
    return ok("entries", f"none lost; {told}{_ago(last, at_ms)}")


def _ago(told: Pass, at_ms: int) -> str:
    return f", {max(0, at_ms - told.at_ms) // 1000:,} s ago"


#: A tenant that is refused so often in an hour or two, and was lately, does not wait as it is told.
_OFTEN: Final = 10
_LATELY_MS: Final = 600_000
#: A tenant at `max_running_requests` whose oldest request has waited so long is held all the time.
_HELD_MS: Final = 600_000
#: Limits of one request: waiting does not help.
_LASTING: Final = frozenset({"max_tokens", "models", "classes"})


# Tenants: their settings, and limits that refuse or hold their requests all the time.


def check_tenants(snapshot: Snapshot, evidence: Evidence) -> Iterator[Finding]:
    """Settings that cannot be read, and tenants that hit their limits all the time."""
    if evidence.tenants is None:
        why = evidence.unseen.get("tenants", "")
        yield unknown("tenants", f"the settings of tenants cannot be seen: {why}")
        return
    problems = 0
    for one in evidence.tenants:
        found = list(_of(one, snapshot.at_ms, evidence.held_ms.get(one.name, 0)))
        problems += len(found)
        if problems <= _MOST_NAMED:
            yield from found
    if problems > _MOST_NAMED:
        todo = "tokenyard tenants list, and show for each."
        yield warning("tenants", f"{problems:,} such problems in all", todo)
    if not problems:
        yield ok("tenants", f"{counted(len(evidence.tenants), 'tenant')}, none at its limits")


def _of(one: TenantView, now_ms: int, held_ms: int) -> Iterator[Finding]:
    if not one.is_readable:
        found = f"the settings of {one.name} cannot be read: it has weight 1 and no limits"
        yield warning("tenants", found, f"Set them again: tokenyard tenants set {one.name} ...")
    if one.is_held and held_ms >= _HELD_MS:
        found = (
            f"{one.name}: max_running_requests holds {counted(one.waiting, 'request')}, the oldest"
            f" for {span(held_ms)}: {one.running:,} run"
        )
        todo = f"Raise it (tokenyard tenants set {one.name} --max-running-requests ...)"
        yield warning("tenants", found, f"{todo}, or let its clients send less.")
    for limit, count in one.refused_lately.items():
        ago_ms = now_ms - one.refused_ms.get(limit, 0)
        if count >= _OFTEN and ago_ms < _LATELY_MS:
            found = (
                f"{one.name}: {limit} has refused {count:,} requests in this hour and the one"
                f" before, the last {span(ago_ms)} ago"
            )
            flag = f"--{limit.replace('_', '-')}"
            todo = f"Raise it (tokenyard tenants set {one.name} {flag} ...), or let its clients"
            then = "ask for what it allows" if limit in _LASTING else "wait as the refusal says"
            yield warning("tenants", found, f"{todo} {then}.")


SNAPSHOT_CHECKS: Final[tuple[Callable[[Snapshot], Iterator[Finding]], ...]] = (
    check_writes,
    check_leader,
    check_workers,
    check_worker_clocks,
    check_versions,
    check_models,
    check_pauses,
    check_leases,
    check_dead,
)
YARD_CHECKS: Final[tuple[Callable[[Snapshot, Evidence], Iterator[Finding]], ...]] = (
    check_lanes,
    check_entries,
    check_tenants,
)
