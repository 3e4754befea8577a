"""What a gateway must know of a model to render its requests and answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
