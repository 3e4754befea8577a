"""Pictures, sound and video of a chat: named by their digest in its messages, and kept beside it.

A part of a message has a name instead of a URL: ``media:<SHA-256>``. The bytes of all parts are one
value at the broker, `Keys.media`, from the submission until the request ends.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tokenyard.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenyard.protocol.wire import Request

#: The parts of a message that name media, with the modality as vLLM calls it.
MODALITIES: Final[Mapping[str, str]] = {
    "image_url": "image",
    "audio_url": "audio",
    "video_url": "video",
}
#: Most bytes of the media of one request.
MAX_MEDIA_BYTES: Final = 64 * 1024 * 1024
#: How long media are kept of a request that does not end.
MEDIA_TTL_S: Final = 7 * 24 * 3600

NAME: Final = re.compile(r"media:[0-9a-f]{64}")
_DATA_URL: Final = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
#: Bytes by name.
Media = Mapping[str, bytes]
NO_MEDIA: Final[Media] = {}

encode_media: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(dict[str, bytes]).decode


def decode_media(raw: bytes) -> Media:
    """Inverse of `encode_media`; raises `InvalidRequest`."""
    try:
        return _decode(raw)
    except msgspec.MsgspecError as error:
        raise InvalidRequest("media", f"cannot be read: {error}") from error


def content_of(url: str) -> bytes | None:
    """What a ``data:`` URL holds, and None for another URL; raises ValueError."""
    head = _DATA_URL.match(url)
    return head and binascii.a2b_base64(url[head.end() :], strict_mode=True)


def name_of(content: bytes) -> str:
    """The name of a picture, a sound or a video."""
    return f"media:{hashlib.sha256(content).hexdigest()}"


def check_media_part(where: str, kind: str, part: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for a part of a message that names no media."""
    url = _url_of(part[kind])
    if "uuid" in part:
        raise InvalidRequest(f"{where}.uuid", "leave it out; each request brings its own media")
    if not isinstance(url, str) or not NAME.fullmatch(url):
        raise InvalidRequest(
            f"{where}.{kind}.url",
            "give the content itself as a base64 data: URL; nothing is fetched from elsewhere",
        )


def media_names(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The names in messages that `check_messages` accepts."""
    for kind, part in _media_parts(messages):
        yield _url_of(part[kind])


def modalities_of(request: Request) -> Counter[str]:
    """How many media of each modality a valid request has."""
    found = Counter(MODALITIES[kind] for kind, _ in _media_parts(request.messages or ()))
    return found + Counter({modality: len(names) for modality, names in request.media.items()})


def _media_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in MODALITIES:
                yield kind, part


def check_media(media: Media, names: Iterable[str]) -> None:
    """Raises `InvalidRequest` where names have not their content."""
    for name in names:
        content = media.get(name)
        if content is None:
            raise InvalidRequest(
                "messages",
                f"{name} is not at the broker, or no longer: media are kept for"
                f" {MEDIA_TTL_S // 86400} days",
            )
        if name_of(content) != name:
            raise InvalidRequest("messages", f"{name} has other content")


def take_media(messages: Sequence[Any]) -> tuple[list[Any], dict[str, bytes]]:
    """Messages with names in the place of data URLs, and the bytes of each name.

    Everything else stays as it is, for `check_messages`. Raises `InvalidRequest`.
    """
    media: dict[str, bytes] = {}
    taken = [_take(f"messages[{at}]", message, media) for at, message in enumerate(messages)]
    size = sum(map(len, media.values()))
    if size > MAX_MEDIA_BYTES:
        raise InvalidRequest(
            "messages", f"the media have {size} bytes, of at most {MAX_MEDIA_BYTES}"
        )
    return taken, media


def _take(where: str, message: Any, media: dict[str, bytes]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = [
        _take_part(f"{where}.content[{at}]", part, media) if isinstance(part, Mapping) else part
        for at, part in enumerate(content)
    ]
    return {**message, "content": parts}


def _take_part(where: str, part: Mapping[str, Any], media: dict[str, bytes]) -> Any:
    kind = part.get("type")
    if kind == "input_audio" and isinstance(sound := part.get(kind), Mapping):
        url: Any = f"data:audio/{sound.get('format')};base64,{sound.get('data')}"
        part, kind = {"type": "audio_url", "audio_url": {"url": url}}, "audio_url"
    elif kind == "input_image":
        url = part.get("image_url")
        part, kind = {"type": "image_url", "image_url": {"url": url}}, "image_url"
    if not isinstance(kind, str) or kind not in MODALITIES:
        return part
    url = _url_of(part.get(kind))
    try:
        content = content_of(url) if isinstance(url, str) else None
    except ValueError as error:
        raise InvalidRequest(f"{where}.{kind}.url", f"is not base64: {error}") from error
    if content is None:
        return part
    name = name_of(content)
    media[name] = content
    told = part[kind]
    kept = {key: value for key, value in told.items() if key != "url"} if told != url else {}
    return {**part, kind: {**kept, "url": name}}


def _url_of(told: Any) -> Any:
    return told.get("url") if isinstance(told, Mapping) else told
