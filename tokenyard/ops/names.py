"""Finds what the name of a model, a worker, a tenant or a request stands for."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote, unquote

from tokenyard.protocol.control import ALL, model_scope, worker_scope
from tokenyard.protocol.errors import BadInput, Refused
from tokenyard.protocol.keys import is_name
from tokenyard.protocol.texts import did_you_mean, listed, printable
from tokenyard.protocol.wire import MAX_ID_BYTES
from tokenyard.yard.pauses import known_models, known_workers
from tokenyard.yard.snapshot import RosterView
from tokenyard.yard.tenants import TenantView


def find_model(view: RosterView, name: str) -> str:
    """The model of this name; raises `Refused`."""
    return find("model", name, known_models(view))


def find_worker(view: RosterView, name: str) -> str:
    """The name of a worker, given with or without its incarnation; raises `Refused`."""
    info = view.live.get(name)
    return find("worker", info.name if info else name, known_workers(view))


def find_scope(view: RosterView, scope: str) -> str:
    """The scope whose model or worker the yard knows; raises `Refused`."""
    kind, _, name = scope.partition(":")
    if kind == "model":
        return model_scope(find_model(view, name))
    if kind == "worker":
        return worker_scope(find_worker(view, name))
    if scope != ALL:
        raise Refused(f"there is no scope {scope[:200]!r}: use all, model:<name> or worker:<name>")
    return ALL


def find_tenant(known: Iterable[TenantView], name: str) -> TenantView:
    """The tenant of this name; raises `Refused`."""
    by_name = {one.name: one for one in known}
    return by_name[find("tenant", name, sorted(by_name))]


def find(kind: str, name: str, names: Iterable[str]) -> str:
    """The name itself, if it is one of ``names``; raises `Refused`."""
    known = list(names)
    if name in known:
        return name
    hint = printable(did_you_mean(name, known)) or "."
    those = f"Known {kind}s: {listed(known)}" if known else f"The yard knows no {kind}"
    raise Refused(f"there is no {kind} {name[:200]!r}{hint} {those}", kind)


def request_name(client: str, request_id: str) -> str:
    """A request as one text of plain ASCII; `named_request` is the inverse.

    An id has any characters, and browsers change some of them in the fields of a form.
    """
    return f"{client}/{quote(request_id, safe='')}"


def named_request(name: str) -> tuple[str, str]:
    """Client and id of a request by its `request_name`; raises `BadInput`."""
    client, _, quoted = name.strip().partition("/")
    return checked_request(client, unquote(quoted, errors="replace"))


def checked_request(client: str, request_id: str) -> tuple[str, str]:
    """Client and id if there can be such a request; raises `BadInput`."""
    if not is_name(client):
        raise BadInput("client: give the name of the request's client")
    if not 0 < len(request_id.encode(errors="replace")) <= MAX_ID_BYTES:
        raise BadInput(f"id: a request's id has 1 to {MAX_ID_BYTES} bytes")
    return client, request_id
