"""Pictures, sound and video in a gateway: they are named for a worker, and not decoded here.

vLLM's front end finds them in a chat and puts their marks into the prompt; the model's processor,
which makes the marks as long as a picture has tokens, runs in the worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from tokenyard.protocol.media import (
    MAX_MEDIA_BYTES,
    MODALITIES,
    content_of,
    name_of,
)

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine import EngineCoreRequest

_KINDS = frozenset(MODALITIES.values())
#: What would change how a worker reads the media, and does not go there.
_REFUSED = ("mm_processor_kwargs", "media_io_kwargs")


@dataclass(frozen=True, slots=True)
class NamedMedia:
    """The media of a prompt: names by modality, in the order of their marks, and bytes by name."""

    names: dict[str, list[str]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)


class _Connector(MediaConnector):
    """Gives the bytes of a URL to whoever asks vLLM to fetch it."""

    def load_from_url(self, url: str, media_io: Any, **_: Any) -> Any:  # noqa: ARG002
        try:
            content = content_of(url)
        except ValueError as error:
            raise VLLMValidationError(f"a data: URL is not base64: {error}") from error
        if content is None:
            raise VLLMValidationError(
                "nothing is fetched from elsewhere: give the content as a base64 data: URL"
            )
        return content

    async def load_from_url_async(self, url: str, media_io: Any, **_: Any) -> Any:
        return self.load_from_url(url, media_io)


def pass_media_on() -> None:
    """Have vLLM fetch and decode nothing that a request names, in this process."""
    MEDIA_CONNECTOR_REGISTRY.register(envs.VLLM_MEDIA_CONNECTOR)(_Connector)
    tracker = _chat_utils().BaseMultiModalItemTracker  # each part that is no text passes it
    add = tracker.add

    def add_raw(self: Any, modality: str, item: Any) -> Any:
        if modality not in _KINDS:
            raise VLLMValidationError(f"{modality} does not go through the queue")
        return add(self, modality, item)

    tracker.add = add_raw


def _chat_utils() -> Any:
    """The module with the parts of chats, which 0.32 has moved."""
    try:
        return importlib.import_module("vllm.renderers.chat_utils")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.entrypoints.chat_utils")


def name_media(renderer: BaseRenderer[Any]) -> None:
    """Let a renderer leave the media of a prompt as they are, as `media` of what it makes."""
    process: Any = renderer
    in_thread, here = process._process_tokens_async, process._process_tokens  # noqa: SLF001

    def parted(prompt: Mapping[str, Any]) -> tuple[dict[str, Any], NamedMedia]:
        rest = dict(prompt)
        data, uuids = rest.pop("multi_modal_data", None), rest.pop("multi_modal_uuids", None)
        for name in _REFUSED:
            if rest.pop(name, None):
                _refuse(f"{name} does not go through the queue", name)
        if any(uuid for some in (uuids or {}).values() for uuid in some or ()):
            _refuse("uuid: leave it out; each request brings its own media", "uuid")
        media = NamedMedia()
        for modality, contents in (data or {}).items():
            media.names[modality] = [name_of(content) for content in contents]
            media.contents.update(zip(media.names[modality], contents, strict=True))
        if (size := sum(map(len, media.contents.values()))) > MAX_MEDIA_BYTES:
            _refuse(f"the media have {size} bytes, of at most {MAX_MEDIA_BYTES}", "messages")
        return rest, media

    async def process_in_thread(prompt: Mapping[str, Any], **options: Any) -> Any:
        rest, media = parted(prompt)
        made = await in_thread(rest, **options)
        return {**made, "media": media} if media.names else made

    def process_here(prompt: Mapping[str, Any], **options: Any) -> Any:
        rest, media = parted(prompt)
        made = here(rest, **options)
        return {**made, "media": media} if media.names else made

    process._process_tokens_async = process_in_thread  # noqa: SLF001
    process._process_tokens = process_here  # noqa: SLF001


def lengthen_prompt(core: EngineCoreRequest, length: int) -> None:
    """Give a prompt the length that it has with its media: vLLM's front end counts its tokens."""
    tokens = core.prompt_token_ids or []
    core.prompt_token_ids = tokens + tokens[-1:] * (length - len(tokens))


def _refuse(message: str, parameter: str) -> NoReturn:
    raise VLLMValidationError(message, parameter=parameter)
