"""Who asks: the tenant of a key, and what the key may use."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers

from gateway.http.errors import GatewayError
from gateway.queue.yard import YardQueue
from tokenyard import clock
from tokenyard.protocol.api_keys import ApiKey, key_digest
from tokenyard.protocol.keys import PriorityClass, http_client

#: How long a key that was looked up is trusted: so long a revoked one may still be used.
_TRUSTED_S: Final = 2.0
_MOST_CACHED: Final = 10_000
_MOST_BYTES: Final = 512
#: OpenAI's names for classes of service.
_TIERS: Final[dict[Any, PriorityClass | None]] = {
    None: None,
    "auto": None,
    "scale": None,  # sold by OpenAI
    "standard_only": None,  # Anthropic's
    "default": "normal",
    "flex": "low",
    "priority": "high",
}
_BEST_FIRST: Final[tuple[PriorityClass, ...]] = ("normal", "low", "high")


class Principal(ApiKey, frozen=True):
    """The one who asks, as its key says; without keys, one without limits."""

    @property
    def client(self) -> str:
        """The owner of its requests on the queue."""
        return http_client(self.tenant)

    def may_use(self, model: str) -> bool:
        """Whether it may use a model."""
        return self.models is None or model in self.models

    def choose_class(self, body: dict[str, Any]) -> PriorityClass:
        """The class of a request by its ``service_tier``; raises `GatewayError`."""
        tier = body.get("service_tier")
        if not isinstance(tier, str | None) or tier not in _TIERS:
            raise GatewayError(
                400,
                f"service_tier: give one of {', '.join(filter(None, _TIERS))}",
                param="service_tier",
            )
        chosen = _TIERS[tier]
        if chosen is None:
            allowed = [one for one in _BEST_FIRST if self._may_have(one)]
            chosen = allowed[0] if allowed else "normal"
        if not self._may_have(chosen):
            raise GatewayError(
                403, f"this key may not use the service tier {tier!r}", param="service_tier"
            )
        return chosen

    @property
    def may_go_first(self) -> bool:
        """Whether it may give a priority before that of others, which is a negative one."""
        return self._may_have("high")

    def _may_have(self, name: PriorityClass) -> bool:
        return self.classes is None or name in self.classes


_decode_principal: Final = msgspec.json.Decoder(Principal).decode


class PrincipalLookup:
    """Finds the principal of a request by its key."""

    def __init__(self, queue: YardQueue, *, needs_key: bool) -> None:
        self._queue = queue
        self._needs_key = needs_key
        self._known: dict[str, tuple[float, Principal | None]] = {}

    async def find(self, headers: Headers) -> Principal:
        """The principal; raises `GatewayError` for a missing or an invalid key."""
        if not self._needs_key:
            return Principal()
        key = _key_of(headers)
        if not key or len(key) > _MOST_BYTES:
            raise _refusal("give a key: Authorization: Bearer ...")
        digest = key_digest(key)
        at, principal = self._known.get(digest, (0.0, None))
        if clock.monotonic() - at > _TRUSTED_S:
            principal = await self._read(digest)
        if principal is None:
            raise _refusal("this key is not valid")
        if not principal.tenant:
            message = "this key opens the board only: the API needs a key of a tenant"
            raise GatewayError(403, message)
        return principal

    async def _read(self, digest: str) -> Principal | None:
        packed = await self._queue.broker.command("HGET", self._queue.keys.api_keys, digest)
        principal = None
        if packed is not None:
            with contextlib.suppress(msgspec.DecodeError):
                principal = _decode_principal(packed)
        if len(self._known) >= _MOST_CACHED:
            self._known.clear()
        self._known[digest] = clock.monotonic(), principal
        return principal


def _key_of(headers: Headers) -> str:
    """The key of OpenAI's clients, or of Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key", "").strip()


def _refusal(message: str) -> GatewayError:
    return GatewayError(401, message, code="invalid_api_key")
