"""Which models the yard has; each is made ready before anybody asks.

``GET /v1/models`` lists them in OpenAI's form, with vLLM's fields, and says whether a worker holds
the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.announcements import ModelProfile, OwnRules, by_request_name, read_hosts
from gateway.http.errors import GatewayError, unavailable
from tokenyard import clock
from tokenyard.broker.tasks import BackgroundLoop, end_task
from tokenyard.protocol.texts import did_you_mean
from tokenyard.protocol.worker_info import WorkerInfo, decode_worker

if TYPE_CHECKING:
    from gateway.frontend.models import FrontEnds
    from gateway.queue.yard import YardQueue

log = logging.getLogger("tokenyard.gateway")

#: A model is forgotten so long after the last entry of a host that has it: a broker may have lost
#: its data, which hosts write again within seconds.
_FORGET_S: Final = 60.0
#: A model that could not be made ready is tried again after so long.
_AGAIN_S: Final = 30.0
#: What the states of workers mean for a model, the best first.
_WARMTH: Final[Mapping[str, str]] = {"ready": "warm", "loading": "loading", "asleep": "asleep"}
#: A wrong name is compared with so many: each takes time in which nothing else is answered.
_MOST_COMPARED: Final = 100


class ModelWatch:
    """Follows the hosts of the yard.

    Announced settings replace earlier ones once their front end is ready.
    """

    def __init__(
        self,
        queue: YardQueue,
        front_ends: FrontEnds,
        every_s: float,
        rules: OwnRules | None = None,
        *,
        is_eager: bool = True,
    ) -> None:
        """Without ``is_eager`` a model's front end is made at its first request."""
        self._queue = queue
        self._front_ends = front_ends
        self._every_s = every_s
        self._rules = rules or OwnRules()
        self._is_eager = is_eager
        #: What hosts say now; the latest profile of each model; the one that answers requests.
        self._announced: Mapping[str, ModelProfile] = {}
        #: Why no host can load a model, by its name.
        self.load_faults: Mapping[str, str] = {}
        #: The model of requests that name none; "" where there are several.
        self.only = ""
        self._wanted: dict[str, ModelProfile] = {}
        self._served: dict[str, ModelProfile] = {}
        self._by_name: dict[str, ModelProfile] = {}
        self._seen_at: dict[str, float] = {}
        self._last: tuple[Any, frozenset[str]] | None = None
        self._complained: set[str] = set()
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self.loop = BackgroundLoop(self._turn, "following the yard's models", log)

    @property
    def profiles(self) -> Mapping[str, ModelProfile]:
        """The profile for each name that a request may use, also those of adapters."""
        return self._by_name

    def find(self, body: Mapping[str, Any], may_use: Callable[[str], bool]) -> ModelProfile:
        """The model that a body names, or the only one; raises `GatewayError`."""
        if not self.profiles:
            raise unavailable("no host has announced a model to the yard yet", param="model")
        name = body.get("model")
        if name is None:
            name = self.only or None
        if not isinstance(name, str):
            raise GatewayError(400, "name a model", param="model")
        return self._profile(name, may_use)

    def _profile(self, name: str, may_use: Callable[[str], bool]) -> ModelProfile:
        profile = self.profiles.get(name)
        if profile is None or not may_use(name):
            raise _unknown_model(name, filter(may_use, self.profiles))
        return profile

    async def cards(self, may_use: Callable[[str], bool]) -> dict[str, Any]:
        """All models and adapters that one may use, by name."""
        workers = await self.workers()
        profiles = sorted(self.profiles.items())
        cards = [self._card(name, profile, workers) for name, profile in profiles if may_use(name)]
        return {"object": "list", "data": cards}

    async def card(self, name: str, may_use: Callable[[str], bool]) -> dict[str, Any]:
        """One of them; raises `GatewayError`."""
        return self._card(name, self._profile(name, may_use), await self.workers())

    def _card(
        self, name: str, profile: ModelProfile, workers: Iterable[WorkerInfo]
    ) -> dict[str, Any]:
        holders = [worker for worker in workers if worker.model == profile.name]
        length = self._front_ends.max_model_len(profile)
        card: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "tokenyard",
            "root": name if name != profile.name else profile.path,
            "parent": profile.name if name != profile.name else None,
            "max_model_len": length or max((one.max_model_len for one in holders), default=None),
            "state": warmth({worker.state for worker in holders}),
        }
        fault = self._front_ends.fault(profile)
        if card["state"] == "cold" and (why := self.load_faults.get(profile.name)):
            card["state"], fault = "failed", fault or why
        return card | {"fault": fault} if fault else card

    async def start(self) -> None:
        """Look once, and go on looking."""
        await self.look()
        self.loop.start()

    async def stop(self) -> None:
        """Stop looking."""
        await self.loop.stop()
        for task in list(self._preparing.values()):
            await end_task(task)

    async def _turn(self) -> None:
        await clock.pause(self._every_s)
        await self.look()

    async def look(self) -> None:
        """Read what hosts announce, and act on what is new."""
        entries = await self._queue.broker.command("HGETALL", self._queue.keys.hosts)
        # The roster only says which of several hosts counts.
        live = frozenset(
            worker.controller for worker in (await self.workers() if len(entries) > 1 else ())
        )
        if self._last != (entries, live):
            announced = read_hosts(entries, live, self._rules)
            for complaint in sorted(announced.complaints):
                self._complain(complaint)
            for profile in announced.profiles.values():
                self._take(profile)
            self._last, self._announced = (entries, live), announced.profiles
            self.load_faults, self.only = announced.load_faults, announced.only
        self._drop_unannounced(clock.monotonic())
        self._prepare_again(clock.monotonic())

    async def workers(self) -> list[WorkerInfo]:
        """The workers with a lease."""
        keys = self._queue.keys
        roster = await self._queue.broker.command("HGETALL", keys.workers)
        found = []
        for name in await self._queue.broker.command(
            "ZRANGE", keys.leases, "(0", "+inf", "BYSCORE"
        ):
            try:
                found += [decode_worker(roster[name])] if name in roster else []
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._complain(f"the roster's entry of {name!r} cannot be read")
        return found

    def _take(self, profile: ModelProfile) -> None:
        earlier, served = self._wanted.get(profile.name), self._served.get(profile.name)
        if earlier == profile:
            return
        self._wanted[profile.name] = profile
        if served is None or not self._is_eager:
            self._serve(profile)
        if served != profile and self._is_eager:
            self._prepare(profile)
        elif earlier is not None:  # taken back before it was ready
            self._cancel_preparation(profile.name)
            self._front_ends.forget(earlier)

    def _serve(self, profile: ModelProfile) -> None:
        old = self._served.get(profile.name)
        self._served[profile.name] = profile
        self._by_name = by_request_name(self._served)
        if old is not None and old != profile:
            self._front_ends.forget(old)

    def _prepare(self, profile: ModelProfile) -> None:
        self._cancel_preparation(profile.name)
        task = asyncio.create_task(self._make(profile), name=f"gateway-model-{profile.name}")
        self._preparing[profile.name] = task

    def _cancel_preparation(self, name: str) -> None:
        earlier = self._preparing.pop(name, None)
        if earlier is not None:
            earlier.cancel()

    async def _make(self, profile: ModelProfile) -> None:
        try:
            await self._front_ends.state_of(profile)
        except GatewayError as error:
            self._complain(error.message)
        except Exception:
            log.exception("the model %r cannot be prepared", profile.name)
        finally:
            if self._preparing.get(profile.name) is asyncio.current_task():
                del self._preparing[profile.name]
        self._serve(profile)

    def _prepare_again(self, now: float) -> None:
        for profile in self._served.values():
            failed_at = self._front_ends.failed_at(profile)
            is_due = failed_at is not None and now - failed_at > _AGAIN_S
            if is_due and profile.name not in self._preparing:
                self._front_ends.forget(profile)
                self._prepare(profile)

    def _drop_unannounced(self, now: float) -> None:
        for name in self._announced:
            self._seen_at[name] = now
        for name in list(self._served):
            if now - self._seen_at.setdefault(name, now) > _FORGET_S:
                log.info("no host has the model %r any more", name)
                self._front_ends.forget(self._served.pop(name))
                self._by_name = by_request_name(self._served)
                self._cancel_preparation(name)
                del self._seen_at[name], self._wanted[name]

    def _complain(self, text: str) -> None:
        if text not in self._complained and len(self._complained) < 1000:
            self._complained.add(text)
            log.warning("%s", text)


def warmth(states: Iterable[str]) -> str:
    """``warm``, ``loading``, ``asleep`` or ``cold``, by the states of the workers that hold it."""
    known = set(states)
    return next((word for state, word in _WARMTH.items() if state in known), "cold")


def _unknown_model(name: str, known: Iterable[str]) -> GatewayError:
    """The error for a model that the yard does not have; ``known`` are those that it might be."""
    hint = did_you_mean(name[:200], islice(known, _MOST_COMPARED)) or "; see GET /v1/models"
    message = f"the model {name[:200]!r} does not exist{hint}"
    return GatewayError(404, message, param="model", code="model_not_found")
