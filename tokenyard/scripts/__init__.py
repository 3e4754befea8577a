"""One typed method for each Lua file in ``tokenyard/scripts/lua``.

`Scripts` calls them over a synchronous connection; both clients use the same `Call` values. Scripts
are called by EVALSHA with the hash of their text, so two versions of Tokenyard can share a server.
Expected refusals are return values here; only a former leader's calls raise (`LostLeadership`).
"""

from tokenyard.scripts.answers import (
    Acceptance,
    Answered,
    Cancelled,
    CancelledUse,
    CancelRequested,
    Charge,
    Dispatched,
    HandedBack,
    LedgerScan,
    LostRequest,
    Move,
    Publication,
    Published,
    Reconciled,
    Renewed,
    Settled,
    Submitted,
    Transfer,
    TransferAnswer,
    Transferred,
    Why,
)
from tokenyard.scripts.calls import (
    MISSING_EVERY_S,
    Arg,
    Call,
    LostLeadership,
    command_of,
    destination,
    digest,
    load_scripts,
    run_async,
    source,
)
from tokenyard.scripts.client import (
    CANCEL_ATTEMPTS,
    CLIENT_LEASE_MS,
    PLACE_FIELDS,
    ClientScripts,
    attend,
    cancel,
    place_of,
    probe,
    request_cancel,
    requeue,
    submit,
    waits_at,
)
from tokenyard.scripts.control import ControlScripts
from tokenyard.scripts.leader import (
    RESCUE_HELD,
    LeaderScripts,
)
from tokenyard.scripts.worker import RETIRE_UNKNOWN, WorkerScripts


class Scripts(ClientScripts, ControlScripts, LeaderScripts, WorkerScripts):
    """The scripts of one yard over one synchronous connection pool."""


__all__ = [
    "CANCEL_ATTEMPTS",
    "CLIENT_LEASE_MS",
    "MISSING_EVERY_S",
    "PLACE_FIELDS",
    "RESCUE_HELD",
    "RETIRE_UNKNOWN",
    "Acceptance",
    "Answered",
    "Arg",
    "Call",
    "CancelRequested",
    "Cancelled",
    "CancelledUse",
    "Charge",
    "Dispatched",
    "HandedBack",
    "LedgerScan",
    "LostLeadership",
    "LostRequest",
    "Move",
    "Publication",
    "Published",
    "Reconciled",
    "Renewed",
    "Scripts",
    "Settled",
    "Submitted",
    "Transfer",
    "TransferAnswer",
    "Transferred",
    "Why",
    "attend",
    "cancel",
    "command_of",
    "destination",
    "digest",
    "load_scripts",
    "place_of",
    "probe",
    "request_cancel",
    "requeue",
    "run_async",
    "source",
    "submit",
    "waits_at",
]
