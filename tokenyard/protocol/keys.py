"""Every Redis key of a yard, and what it holds.

All keys of a yard share one hash tag, so a yard lives on one node of a Redis Cluster, and a script
may use all of them. docs/protocol.md, section "Keys", is the public form of this file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

if TYPE_CHECKING:
    import redis


PriorityClass = Literal["high", "normal", "low"]
#: Only the system writes ``retry``, which is served first.
IntakeClass = Literal["retry", "high", "normal", "low"]
PRIORITY_CLASSES: Final[tuple[PriorityClass, ...]] = get_args(PriorityClass)
INTAKE_CLASSES: Final[tuple[IntakeClass, ...]] = get_args(IntakeClass)

#: How often each class is served while all of them wait, see docs/run.md, "Who is served first".
CLASS_WEIGHTS: Final[Mapping[PriorityClass, int]] = {"high": 16, "normal": 4, "low": 1}

#: Final states of a line of a batch job.
LINE_STATES: Final = ("completed", "failed")
#: Fields of `tally` that count what neither coordinator nor worker sees: requests that `submit`
#: refuses, cancels, lines of batch jobs. The leader reads them for its metrics.
COUNTED: Final = (
    "count:QUEUE_FULL",
    "count:DEADLINE_EXCEEDED",
    "count:ID_REUSED",
    "count:QUOTA_EXCEEDED",
    *(f"count:cancelled:{name}" for name in PRIORITY_CLASSES),
    *(f"count:lines:{name}" for name in LINE_STATES),
)

#: Field of `tally`: requests that wait in the intakes of tenants; with ``:<class>``, of that class.
TENANTS_WAITING: Final = "tenants_waiting"
#: Field of `tally`: of its ``queued_tokens``, those of tenants.
TENANTS_QUEUED_TOKENS: Final = "tenants_queued_tokens"
#: Field of `tally`: when a tenant last submitted, in ms of the server's clock.
TENANT_CAME: Final = "tenant_came"

#: Names of yards, clients and workers, so that keys cannot be forged.
NAME: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,100}")
NAME_RULE: Final = "use 1 to 100 of A-Z a-z 0-9 _ . : @ -"
#: Longest name of a tenant, so that there is room for the client ``http.<tenant>``.
MAX_TENANT: Final = 90


def is_name(text: str) -> bool:
    """Whether ``text`` may name a yard, a client or a worker."""
    return NAME.fullmatch(text) is not None


def is_tenant(text: str) -> bool:
    """Whether ``text`` may name a tenant; others have no intakes of their own."""
    return len(text) <= MAX_TENANT and is_name(text)


def intake_name(priority_class: PriorityClass, tenant: str = "") -> str:
    """The intake of requests of a class and a tenant: ``<class>`` or ``<class>:<tenant>``."""
    return f"{priority_class}:{tenant}" if is_tenant(tenant) else priority_class


@lru_cache(4096)  # asked for each request
def split_intake(name: str) -> tuple[str, str]:
    """Class and tenant of an intake by its name; the tenant is "" for a common one."""
    priority_class, _, tenant = name.partition(":")
    return priority_class, tenant


@lru_cache(4096)
def class_of(name: str) -> IntakeClass:
    """The class of an intake by its name; raises `ValueError` where there is no such intake."""
    if not is_intake(name):
        raise ValueError(f"intake {name!r}")
    return cast(IntakeClass, split_intake(name)[0])


def is_intake(name: str) -> bool:
    """Whether this is the name of an intake, a common one or a tenant's."""
    if name in INTAKE_CLASSES:
        return True
    priority_class, tenant = split_intake(name)
    return priority_class in PRIORITY_CLASSES and is_tenant(tenant)


class _Key(cached_property[str]):
    """A key of a yard by the name of the attribute that has it."""

    def __init__(self) -> None:
        super().__init__(lambda keys: f"{keys.prefix}{self.attrname}")


@dataclass(frozen=True)
class Keys:
    """Names of the keys of one yard."""

    yard: str
    prefix: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not is_name(self.yard):
            raise ValueError(f"yard {self.yard!r}: {NAME_RULE}")
        object.__setattr__(self, "prefix", f"tokenyard:{{{self.yard}}}:")

    def intake(self, name: str) -> str:
        """Stream of waiting requests; ``name`` comes from `intake_name`, or is ``retry``."""
        return f"{self.prefix}intake:{name}"

    #: Sorted set: tenants with waiting requests, to what they have had; "" is no tenant.
    line = _Key()

    #: Sorted set: tenant to its service, weighted tokens by its weight; of all tenants.
    service = _Key()

    def tenant(self, name: str) -> str:
        """Hash of one tenant: ``waiting``, ``waiting_tokens``, ``running``, ``lifted``, limits."""
        return f"{self.prefix}tenant:{name}"

    #: Hash: tenant to JSON, `tokenyard.protocol.tenants.TenantSettings`.
    tenants = _Key()

    def usage(self, tenant: str) -> str:
        """Hash: ``<yyyymmdd> <model> <what>`` to a count; see `tokenyard.yard.usage`."""
        return f"{self.prefix}usage:{tenant}"

    def lane(self, worker: str) -> str:
        """Stream of the requests assigned to one worker incarnation; its length is the load."""
        return f"{self.prefix}lane:{worker}"

    def ledger(self, client: str, request_id: str) -> str:
        """Hash with the state of one request, and its result once there is one."""
        return f"{self.prefix}request:{client}/{request_id}"

    def tokens(self, client: str, request_id: str) -> str:
        """String: the published tokens of a request that is still running, packed int32."""
        return f"{self.prefix}tokens:{client}/{request_id}"

    def choices(self, client: str, request_id: str) -> str:
        """String: the choice of each of those tokens, a byte each; only of streams with n > 1.

        No client can have this name, so it is not the ``tokens`` of another request.
        """
        return f"{self.prefix}tokens:{client}#/{request_id}"

    def media(self, client: str, request_id: str) -> str:
        """String: the media of a request that has not ended, see `tokenyard.protocol.media`."""
        return f"{self.prefix}media:{client}/{request_id}"

    def reply(self, client: str, request_id: str) -> str:
        """Stream of replies to one request, one entry each, plain fields."""
        return f"{self.prefix}reply:{client}/{request_id}"

    def http_record(self, client: str, durable_id: str) -> str:
        """What gateways remember of an HTTP request, msgpack."""
        return f"{self.prefix}http:{client}/{durable_id}"

    #: Hash: digest of an HTTP key to JSON, `tokenyard.protocol.api_keys.ApiKey`.
    api_keys = _Key()

    def response(self, client: str, durable_id: str) -> str:
        """A response of OpenAI's Responses API that can be asked for again, msgpack."""
        return f"{self.prefix}response:{client}/{durable_id}"

    def stored(self, client: str) -> str:
        """Hash: hour since the epoch to bytes of a client's responses of that hour."""
        return f"{self.prefix}stored:{client}"

    def replies(self, client: str) -> str:
        """Stream of replies, in frames, to all requests of one client that ask for it."""
        return f"{self.prefix}replies:{client}"

    #: Hash, the roster: worker to JSON.
    workers = _Key()

    #: Hash: controller to JSON, the models that each host may load.
    hosts = _Key()

    #: Stream of commands and signals to controllers, bounded.
    control = _Key()

    def acks(self, command: str) -> str:
        """Hash: worker to JSON, the outcome of one command; expires."""
        return f"{self.prefix}acks:{command}"

    #: Hash: scope to JSON, the desired state that operators have set; see `control`.
    desired = _Key()

    #: Sorted set: worker to lease expiry in server ms; 0 lost, -1 left, -2 crashed.
    leases = _Key()

    #: String ``<epoch>:<coordinator>``; expires with the leader's lease.
    leader = _Key()

    #: Stream of wake-ups for the coordinator, bounded.
    events = _Key()

    #: Stream of requests of tenants that came, bounded; clients write it; wakes the leader.
    arrivals = _Key()

    #: Stream of places that became free on lanes, bounded; wakes the leader.
    capacity = _Key()

    #: Stream of dead letters, bounded.
    dead = _Key()

    #: Stream of what operators have done, bounded; see `tokenyard.ops.audit`.
    audit = _Key()

    #: Stream of figures of the yard, one entry each 10 s, bounded; the leader writes it.
    history = _Key()

    #: Sorted set: coordinator that stands by to the end of its announcement in server ms.
    standbys = _Key()

    def board_session(self, digest: str) -> str:
        """String: the login of a browser at the board, JSON; expires."""
        return f"{self.prefix}board_session:{digest}"

    #: Hash: worker to what is on trial on its lane; see `routing.suspicion.QuarantineMark`.
    quarantine = _Key()

    #: Hash: worker to the reason of its departure, until its lane is rescued.
    departed = _Key()

    #: Sorted set: client to lease expiry in ms, for requests that end with their client.
    clients = _Key()

    def attached(self, client: str) -> str:
        """Set: ids of the requests to cancel when that client's lease ends."""
        return f"{self.prefix}attached:{client}"

    def cancels(self, client: str) -> str:
        """Set: ids of requests that a client without permission to cancel wants cancelled."""
        return f"{self.prefix}cancels:{client}"

    #: Stream of clients that have cancel requests, bounded; it wakes the leader.
    cancelling = _Key()

    #: Hash: the contents of the handshake, and the counters of names.
    info = _Key()

    #: Hash of counters that clients also write: waiting tokens, and `COUNTED`.
    tally = _Key()


#: Begins the names of the streams on which gateways are answered.
GATEWAY_CLIENT: Final = "gateway"
#: A batch job is the client of its requests, by its id.
BATCH_PREFIX: Final = "batch_"
#: A client whose program gives it no name.
UNNAMED_PREFIX: Final = "client-"


def http_client(tenant: str) -> str:
    """A gateway's client for the requests of a tenant; "" is none."""
    return f"http.{tenant}" if tenant else "http"


@dataclass(frozen=True)
class Yard:
    """A yard and its broker. Threads may share it, as they may share the connection.

    ``url`` is the broker's, where something is to be said or opened by it.
    """

    connection: redis.Redis
    keys: Keys
    url: str = ""
