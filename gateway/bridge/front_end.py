"""One front end and its lives: the engine is there for each, and sees when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from gateway.bridge import engine_core
from gateway.bridge.engine_core import Addresses, Channel, FrontGone
from tokenyard.broker.tasks import BackgroundLoop, first_of

if TYPE_CHECKING:
    from gateway.bridge.bridge import Bridge
    from gateway.bridge.journal import Journal

log = logging.getLogger("tokenyard.bridge")

#: Time to find the sockets of a front end that an earlier bridge has met.
_FIND_S: Final = 5.0
_GONE: Final = "the bridge was gone"
_NO_SECOND: Final = "vLLM's front end in Python takes no second engine"


class FrontEnd:
    """Serves the front end that waits at an address, again after each of its deaths."""

    def __init__(self, address: str, ready: bytes, journal: Journal, bridge: Bridge) -> None:
        self.address = address
        self._ready = ready
        self._journal = journal
        self._bridge = bridge
        #: Whether it has its engine.
        self.is_served = False
        self.loop = BackgroundLoop(self._live, f"serving the front end at {address}", log)

    async def stop(self) -> None:
        """Leave it without an engine; the next bridge finds it by the journal."""
        await self.loop.stop()
        known = self._journal.addresses
        if known is not None and known.is_python:
            self._end(known)
        self._journal.close()

    async def _live(self) -> None:
        """Serve it until it ends."""
        known, waiting = self._journal.addresses, set(self._journal.open)
        if known is not None and known.is_python:
            log.warning("the front end at %s must start again: %s", self.address, _NO_SECOND)
            self._end(known)
            known = None
        try:
            if known is not None:
                await self._serve(known, waiting)
                return
            log.info("waiting for a front end at %s", self.address)
            addresses = await engine_core.meet(self.address)
            self._journal.begin(addresses)
            await self._serve(addresses, set())
        except FrontGone:
            self._journal.begin(None)

    async def _serve(self, addresses: Addresses, waiting: set[str]) -> None:
        """Be its engine; ``waiting`` are requests of an earlier one. Raises `FrontGone`."""
        pairs = zip(addresses.inputs, addresses.outputs, strict=True)
        channels = [Channel(*pair) for pair in pairs]
        try:
            for channel in channels:
                await channel.register(self._ready, _FIND_S)
                self._bridge.end(waiting, channel, _GONE)
            self._journal.begin(addresses)
            self._bridge.front_ends += 1
            self.is_served = True
            log.info("the front end at %s has its engine", self.address)
            gone = (channel.until_gone() for channel in channels)
            taking = [asyncio.create_task(self._take(channel)) for channel in channels]
            try:
                ended = await first_of(*gone, *taking)
                for task in ended.intersection(taking):
                    task.result()
                raise FrontGone
            finally:
                self.is_served = False
                self._bridge.front_ends -= 1
        except FrontGone:
            log.warning("the front end at %s is gone", self.address)
            for channel in channels:
                self._bridge.abandon(channel)
            raise
        finally:
            for channel in channels:
                channel.close()

    def _end(self, addresses: Addresses) -> None:
        """Have a front end that takes no second engine fail what waits, and end."""
        for pair in zip(addresses.inputs, addresses.outputs, strict=True):
            with contextlib.closing(Channel(*pair)) as channel:
                channel.die()
        self._journal.begin(None)

    async def _take(self, channel: Channel) -> None:
        while True:
            for kind, frames in await channel.receive():
                self._bridge.take(kind, frames, channel, self._journal)
