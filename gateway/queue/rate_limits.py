"""What the limits of a tenant leave it, as the headers of OpenAI's API tell."""

from __future__ import annotations

from typing import Any, Final

from msgspec import MsgspecError

from gateway.queue.calls import carry_out
from tokenyard import clock
from tokenyard.broker.connection import AsyncRedis, translated
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.tenants import DEFAULTS, TenantSettings, decode_tenant
from tokenyard.protocol.token_windows import DAY, MINUTE, TokenWindow

#: How long settings that were read are used: so long a changed limit is not told. It holds at once.
_TRUSTED_S: Final = 2.0
_MOST_CACHED: Final = 10_000
#: In which one request is likely to have left where no rate is known.
_SOON_MS: Final = 1_000

Header = tuple[bytes, bytes]


class RateLimits:
    """Reads limits and counts; a tenant without limits costs no command, but every few seconds."""

    def __init__(self, connection: AsyncRedis, url: str, keys: Keys) -> None:
        self._connection = connection
        self._url = url
        self._keys = keys
        self._known: dict[str, tuple[float, TenantSettings]] = {}

    async def headers(self, tenant: str, eta_ms: int) -> list[Header]:
        """The headers for a tenant whose requests wait for about ``eta_ms`` (-1: unknown).

        Raises a `TokenyardError` where the broker does not answer.
        """
        settings = await self._settings(tenant) if tenant else DEFAULTS
        window = _window(settings)
        if window is None and not settings.max_waiting_requests:
            return []
        with translated(self._url):
            (seconds, micros), [waiting, *buckets] = await carry_out(
                self._connection,
                [
                    ("TIME",),
                    ("HMGET", self._keys.tenant(tenant), "waiting", *(window or MINUTE).fields),
                ],
            )
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        found: list[Header] = []
        if settings.max_waiting_requests:
            taken = int(waiting) if waiting and waiting.isdigit() else 0
            reset_ms = (eta_ms if eta_ms >= 0 else _SOON_MS) if taken else 0
            found += _three(b"requests", settings.max_waiting_requests, taken, reset_ms)
        if window is not None:
            found += _three(
                b"tokens", getattr(settings, window.limit), *window.read(buckets, now_ms)
            )
        return found

    async def _settings(self, tenant: str) -> TenantSettings:
        at, settings = self._known.get(tenant, (0.0, DEFAULTS))
        if clock.monotonic() - at <= _TRUSTED_S and at:
            return settings
        run: Any = self._connection
        with translated(self._url):
            packed = await run.hget(self._keys.tenants, tenant)
        try:
            settings = decode_tenant(packed) if packed else DEFAULTS
        except MsgspecError:
            settings = DEFAULTS
        if len(self._known) >= _MOST_CACHED:
            self._known.clear()
        self._known[tenant] = clock.monotonic(), settings
        return settings


def _window(settings: TenantSettings) -> TokenWindow | None:
    if settings.tokens_per_minute:
        return MINUTE
    return DAY if settings.tokens_per_day else None


def _three(what: bytes, limit: int, taken: int, reset_ms: int) -> list[Header]:
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % max(0, limit - taken)),
        (b"x-ratelimit-reset-" + what, duration(reset_ms).encode()),
    ]


def duration(ms: int) -> str:
    """A time as OpenAI writes it: ``250ms``, ``1.5s``, ``6m0s``, ``2h0m3s``."""
    if ms < 1000:
        return f"{max(0, ms)}ms" if ms > 0 else "0s"
    seconds = ms / 1000
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if not minutes:
        return f"{seconds:g}s"
    rest = f"{minutes % 60}m{int(seconds % 60)}s"
    return f"{hours}h{rest}" if hours else rest
