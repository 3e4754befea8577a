"""Pictures, sound and video in vLLM: from the names in messages to what the engine takes.

vLLM's own parts read and check the bytes, so its limits hold (`VLLM_MAX_IMAGE_PIXELS`). Nothing is
fetched: a URL that is no name of the request's media has no content.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from vllm import envs
from vllm.config import ModelConfig
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.base import MediaIO

from tokenyard.protocol.media import NO_MEDIA, Media

# For each sound it warns of the libraries that are not there, although others are.
logging.getLogger("vllm.multimodal.media.audio").setLevel(logging.ERROR)
_shown: ContextVar[Media] = ContextVar("media", default=NO_MEDIA)


@contextmanager
def shown(media: Media) -> Iterator[None]:
    """Let vLLM read these media, in this thread."""
    token = _shown.set(media)
    try:
        yield
    finally:
        _shown.reset(token)


def read(names: Mapping[str, Sequence[str]], media: Media, model: ModelConfig) -> dict[str, Any]:
    """The media of a prompt by modality, as vLLM's processors take them."""
    own = model.multimodal_config
    connector = _Connector(own.media_io_kwargs if own else None)
    fetch: dict[str, Callable[[str], Any]] = {
        "image": connector.fetch_image,
        "audio": connector.fetch_audio,
        "video": connector.fetch_video,
    }
    with shown(media):
        return {
            modality: [fetch[modality](one) for one in some] for modality, some in names.items()
        }


@MEDIA_CONNECTOR_REGISTRY.register(envs.VLLM_MEDIA_CONNECTOR)
class _Connector(MediaConnector):
    """Reads the media that are shown."""

    def load_from_url(self, url: str, media_io: MediaIO[Any], **_: Any) -> Any:
        content = _shown.get().get(url)
        if content is None:
            raise ValueError(f"{url[:80]} is not among the media of the request")
        return media_io.load_bytes(content)
