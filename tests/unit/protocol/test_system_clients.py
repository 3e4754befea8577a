"""No guest has a name by which it would be a client that the system makes."""

from __future__ import annotations

import pytest

from gateway.batches.asked import read_batch
from gateway.http.principal import Principal
from tokenyard.batch.state import new_id
from tokenyard.client.sync import Client
from tokenyard.protocol.receipts import owns
from tokenyard.protocol.system_clients import GATEWAY_CLIENT, why_no_guest
from tokenyard.protocol.wire import DEFAULT_CLIENT


def made_by_the_system() -> list[str]:
    """A client of each kind, from the code that makes it."""
    asked = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    return [
        DEFAULT_CLIENT,
        Principal().client,
        Principal(tenant="bob").client,
        Principal(tenant="bob-1").client,
        GATEWAY_CLIENT,
        new_id(),
        read_batch(asked, "http", None, 0).id,
        Client("redis://nowhere.invalid").client_id,
    ]


def test_no_guest_owns_a_client_of_the_system() -> None:
    """Neither by its whole name, nor by what stands before a `-` in it."""
    for client in made_by_the_system():
        ends = [at for at, letter in enumerate(client) if letter == "-"]
        owners = [client, *(client[:at] for at in ends)]
        assert all(owns(one, client) for one in owners)
        assert [one for one in owners if not why_no_guest(one)] == []


@pytest.mark.parametrize("name", ["http.", "http.bob", "batch", "batch_x", "client", "client-x"])
def test_the_reason_says_whose_name_it_is(name: str) -> None:
    assert why_no_guest(name).startswith("the system gives such names itself, to ")


@pytest.mark.parametrize(
    "name",
    ["guest", "bob", "https", "http-bob", "httpx", "anonymous", "batches", "clients", "b.http"],
)
def test_names_that_only_look_alike_are_free(name: str) -> None:
    assert why_no_guest(name) == ""
