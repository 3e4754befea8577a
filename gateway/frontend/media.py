"""Pictures, sound and video in a gateway: they are named for a worker, and not decoded here.

vLLM's front end finds them in a chat and puts their marks into the prompt; the model's processor,
which makes the marks as long as a picture has tokens, runs in the worker. Only the sound of a
transcription is decoded here, since vLLM's front end cuts it into pieces, each a request.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NoReturn

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader import get_model_cls
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from gateway.frontend.fetching import LARGE, MediaFetcher
from gateway.frontend.side import tell_home
from gateway.http.context import CURRENT
from gateway.http.errors import GatewayError
from tokenyard.protocol.media import MAX_MEDIA_BYTES, MODALITIES, name_of

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.renderers import BaseRenderer
    from vllm.v1.engine import EngineCoreRequest

#: Bytes of a form with a file of sound: vLLM's bound, and what stands beside it.
MAX_FORM_BYTES: Final = envs.VLLM_MAX_AUDIO_CLIP_FILESIZE_MB * 1024 * 1024 + 64 * 1024
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

    def __init__(self, fetcher: MediaFetcher, **options: Any) -> None:
        super().__init__(**options)
        self._fetcher = fetcher

    def load_from_url(self, *_: Any, **__: Any) -> Any:
        raise VLLMValidationError("media are read by endpoints alone")

    async def load_from_url_async(
        self,
        url: str,
        media_io: Any,  # noqa: ARG002
        *,
        fetch_timeout: int | None = None,
    ) -> Any:
        context = CURRENT.get()
        try:
            timeout_s = fetch_timeout or envs.VLLM_VIDEO_FETCH_TIMEOUT
            return await self._fetcher.content(url, context, timeout_s)
        except GatewayError as error:
            if context is not None and error.status != HTTPStatus.BAD_REQUEST:
                context.unfetched = error
                return url.encode()
            if context is not None:
                tell_home(context.ticket.fail, error)
            raise VLLMValidationError(error.message) from error


def pass_media_on(fetcher: MediaFetcher) -> None:
    """Have vLLM decode nothing that a request names, and fetch it by ``fetcher``."""
    # For each sound it warns of the libraries that are not there, although others are.
    logging.getLogger("vllm.multimodal.media.audio").setLevel(logging.ERROR)
    connector: Any = functools.partial(_Connector, fetcher)
    MEDIA_CONNECTOR_REGISTRY.register(envs.VLLM_MEDIA_CONNECTOR)(connector)
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
    public: Any = renderer
    in_thread, here = public.process_for_engine_async, public.process_for_engine

    async def process_in_thread(prompt: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        parted = prompt, renderer.model_config
        is_large = _size(prompt) > LARGE
        rest, media = await asyncio.to_thread(_parted, *parted) if is_large else _parted(*parted)
        made = await in_thread(rest, *args, **options)
        return {**made, "media": media} if media.names else made

    def process_here(prompt: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        rest, media = _parted(prompt, renderer.model_config)
        made = here(rest, *args, **options)
        return {**made, "media": media} if media.names else made

    public.process_for_engine_async = process_in_thread
    public.process_for_engine = process_here


def _size(prompt: Mapping[str, Any]) -> int:
    """The bytes of its pictures, sounds and videos."""
    lists = (prompt.get("multi_modal_data") or {}).values()
    return sum(len(item) for items in lists if isinstance(items, list) for item in items)


def _parted(prompt: Mapping[str, Any], model: ModelConfig) -> tuple[dict[str, Any], NamedMedia]:
    """A prompt without its media, and those; raises `VLLMValidationError`."""
    rest = dict(prompt)
    if "encoder_prompt" in rest:  # it has the media, and the decoder's has the tokens
        rest["encoder_prompt"], media = _parted(rest["encoder_prompt"], model)
        return rest, media
    data, uuids = rest.pop("multi_modal_data", None), rest.pop("multi_modal_uuids", None)
    for name in _REFUSED:
        if rest.pop(name, None):
            _refuse(f"{name} does not go through the queue", name)
    if any(uuid for some in (uuids or {}).values() for uuid in some or ()):
        _refuse("uuid: leave it out; each request brings its own media", "uuid")
    media = NamedMedia()
    for modality, given in (data or {}).items():
        items = given if isinstance(given, list) else [_sound_file(given, model)]
        media.names[modality] = [name_of(content) for content in items]
        media.contents.update(zip(media.names[modality], items, strict=True))
    if (size := sum(map(len, media.contents.values()))) > MAX_MEDIA_BYTES:
        _refuse(f"the media have {size} bytes, of at most {MAX_MEDIA_BYTES}", "messages")
    return rest, media


def can_hear() -> bool:
    """Whether the libraries are there with which vLLM reads sound."""
    return importlib.util.find_spec("soundfile") is not None


def _sound_file(given: Any, model: ModelConfig) -> bytes:
    """A file with the very numbers of a piece of sound that vLLM has cut."""
    import soundfile

    sound, rate = given if isinstance(given, tuple) else (given, None)
    if rate is None:
        transcriber: Any = get_model_cls(model)
        rate = transcriber.get_speech_to_text_config(model, "transcribe").sample_rate
    with io.BytesIO() as file:  # not WAV, which has the time in it
        soundfile.write(file, sound, int(rate), format="AU", subtype="FLOAT")
        return file.getvalue()


def lengthen_prompt(core: EngineCoreRequest, length: int) -> None:
    """Give a prompt the length that it has with its media: vLLM's front end counts its tokens."""
    tokens = core.prompt_token_ids or []
    core.prompt_token_ids = tokens + tokens[-1:] * (length - len(tokens))


def _refuse(message: str, parameter: str) -> NoReturn:
    raise VLLMValidationError(message, parameter=parameter)
