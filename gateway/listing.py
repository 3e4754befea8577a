"""``GET /v1/models``: OpenAI's form, with vLLM's fields, and whether a worker holds the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from gateway.announcements import ModelProfile
from gateway.http.errors import GatewayError, unavailable
from tokenyard.protocol.texts import did_you_mean
from tokenyard.protocol.worker_info import WorkerInfo

if TYPE_CHECKING:
    from gateway.frontend.models import FrontEnds
    from gateway.models import ModelWatch

#: What the states of workers mean for a model, the best first.
_WARMTH: Final[Mapping[str, str]] = {"ready": "warm", "loading": "loading", "asleep": "asleep"}
#: A wrong name is compared with so many: each takes time in which nothing else is answered.
_MOST_COMPARED: Final = 100


@dataclass(frozen=True, slots=True)
class ModelList:
    """The models of the yard, as clients see them."""

    models: ModelWatch
    front_ends: FrontEnds

    async def all(self, may_use: Callable[[str], bool]) -> dict[str, Any]:
        """All models and adapters that one may use, by name."""
        workers = await self.models.workers()
        profiles = sorted(self.models.profiles.items())
        cards = [self._card(name, profile, workers) for name, profile in profiles if may_use(name)]
        return {"object": "list", "data": cards}

    async def one(self, name: str, may_use: Callable[[str], bool]) -> dict[str, Any]:
        """One of them; raises `GatewayError`."""
        profile = self.models.profiles.get(name)
        if profile is None or not may_use(name):
            raise unknown_model(name, filter(may_use, self.models.profiles))
        return self._card(name, profile, await self.models.workers())

    def _card(
        self, name: str, profile: ModelProfile, workers: Iterable[WorkerInfo]
    ) -> dict[str, Any]:
        holders = [worker for worker in workers if worker.model == profile.name]
        length = self.front_ends.max_model_len(profile)
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
        fault = self.front_ends.fault(profile)
        if card["state"] == "cold" and (why := self.models.load_faults.get(profile.name)):
            card["state"], fault = "failed", fault or why
        return card | {"fault": fault} if fault else card


def warmth(states: Iterable[str]) -> str:
    """``warm``, ``loading``, ``asleep`` or ``cold``, by the states of the workers that hold it."""
    known = set(states)
    return next((word for state, word in _WARMTH.items() if state in known), "cold")


def find_model(
    models: ModelWatch, body: Mapping[str, Any], may_use: Callable[[str], bool]
) -> ModelProfile:
    """The model that a body names, or the only one; raises `GatewayError`."""
    profiles = models.profiles
    if not profiles:
        raise unavailable("no host has announced a model to the yard yet", param="model")
    name = body.get("model")
    if name is None:
        name = models.only or None
    if not isinstance(name, str):
        raise GatewayError(400, "name a model", param="model")
    profile = profiles.get(name)
    if profile is None or not may_use(name):
        raise unknown_model(name, filter(may_use, profiles))
    return profile


def unknown_model(name: str, known: Iterable[str]) -> GatewayError:
    """The error for a model that the yard does not have; ``known`` are those that it might be."""
    hint = did_you_mean(name[:200], islice(known, _MOST_COMPARED)) or "; see GET /v1/models"
    message = f"the model {name[:200]!r} does not exist{hint}"
    return GatewayError(404, message, param="model", code="model_not_found")
