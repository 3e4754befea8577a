"""Tokenyard: a durable job queue for LLM inference on Redis Streams.

    from tokenyard import Client

    with Client("redis://localhost:6379") as client:
        print(client.submit("12+34=", max_tokens=8).result().text)

Names are loaded when first used, so that `import tokenyard` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenyard.client.aio import AsyncClient, AsyncHandle
    from tokenyard.client.arrays import arrays
    from tokenyard.client.handshake import YardInfo
    from tokenyard.client.ledger import Cancellation, RequestState
    from tokenyard.client.sync import Client, Handle
    from tokenyard.protocol.errors import (
        BrokerNotWritable,
        BrokerUnavailable,
        BrokerUnsuitable,
        Code,
        DeadlineUnmeetable,
        IdReused,
        InvalidRequest,
        NoCoordinator,
        NotDurable,
        NotPermitted,
        PermanentError,
        ProtocolMismatch,
        QueueFull,
        QuotaExceeded,
        RequestFailed,
        SettingsError,
        TokenyardError,
        TransientError,
        UnknownRequest,
        WaitTimeout,
    )
    from tokenyard.protocol.replies import Delta, Result
    from tokenyard.protocol.wire import PoolingParams, SamplingParams, StructuredOutputs

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncHandle",
    "BrokerNotWritable",
    "BrokerUnavailable",
    "BrokerUnsuitable",
    "Cancellation",
    "Client",
    "Code",
    "DeadlineUnmeetable",
    "Delta",
    "Handle",
    "IdReused",
    "InvalidRequest",
    "NoCoordinator",
    "NotDurable",
    "NotPermitted",
    "PermanentError",
    "PoolingParams",
    "ProtocolMismatch",
    "QueueFull",
    "QuotaExceeded",
    "RequestFailed",
    "RequestState",
    "Result",
    "SamplingParams",
    "SettingsError",
    "StructuredOutputs",
    "TokenyardError",
    "TransientError",
    "UnknownRequest",
    "WaitTimeout",
    "YardInfo",
    "__version__",
    "arrays",
]

_MODULES = {
    "client.aio": ("AsyncClient", "AsyncHandle"),
    "client.arrays": ("arrays",),
    "client.handshake": ("YardInfo",),
    "client.ledger": ("Cancellation", "RequestState"),
    "client.sync": ("Client", "Handle"),
    "protocol.replies": ("Delta", "Result"),
    "protocol.wire": ("PoolingParams", "SamplingParams", "StructuredOutputs"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _HOME.get(name, "protocol.errors")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
