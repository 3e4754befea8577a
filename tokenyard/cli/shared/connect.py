"""Finds the broker of a yard and connects to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokenyard.broker.connection import connected
from tokenyard.process.program import YardChoice
from tokenyard.process.running import broker_url, no_broker
from tokenyard.protocol.keys import Keys, Yard


@contextmanager
def opened(choice: YardChoice) -> Iterator[Yard]:
    """The yard over a connection; raises `tokenyard.protocol.errors`."""
    url = url_of(choice)
    with connected(url) as connection:
        yield Yard(connection, Keys(choice.yard), url)


def url_of(choice: YardChoice) -> str:
    """The broker's URL, given or found; raises `BrokerUnavailable` if there is none."""
    url = broker_url(choice.redis_url, choice.yard)
    if not url:
        raise no_broker(choice.yard)
    return url
