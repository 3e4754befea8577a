"""What a gateway must know of a model to render its requests and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model, and the arguments of ``vllm serve`` that shape its requests and answers."""

    name: str
    path: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Sampling parameters that the front end fills in, so that a worker's default does not.
    stated: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # names, which requests use like a model's
    fault: str = ""  # why it cannot be served, as far as its announcement shows

    @property
    def fingerprint(self) -> str:
        """The same on all gateways that render this model in the same way."""
        shown = json.dumps([self.name, self.path, dict(self.arguments)], sort_keys=True)
        return f"tokenyard-{blake2b(shown.encode(), digest_size=4).hexdigest()}"
