"""The tokens of a running request: their number, and the last of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenyard import clock
from tokenyard.client.tokenization import Tokenizer, load_tokenizer
from tokenyard.protocol.wire import unpack_tokens
from tokenyard.protocol.worker_info import decode_worker
from tokenyard.protocol.yard import Yard

log = logging.getLogger("tokenyard.board")

#: Tokens that are read at a look, however many there are.
MOST_TOKENS: Final = 512
_TOKEN_BYTES: Final = 4
#: Tokenizers that are kept, and so long without a look they make room for others.
_MOST_TOKENIZERS: Final = 4
_UNUSED_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Text:
    """The text of some tokens; None where it cannot be known, or not yet."""

    text: str | None = None
    is_loading: bool = False


def last_tokens(yard: Yard, client: str, request_id: str) -> list[int]:
    """The last published tokens."""
    run: Any = yard.connection
    packed = run.getrange(yard.keys.tokens(client, request_id), -MOST_TOKENS * _TOKEN_BYTES, -1)
    return unpack_tokens(packed) if len(packed) % _TOKEN_BYTES == 0 else []


@dataclass(slots=True)
class _Kept:
    tokenizer: Tokenizer | None  # None: it could not be loaded
    used_s: float  # monotonic


class Tokenizers:
    """Tokenizers of models whose files are on this host; each is loaded beside the first look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}  # by path
        self._loading: set[str] = set()

    def text(self, yard: Yard, worker: str, tokens: Sequence[int]) -> Text:
        """The text of tokens by the tokenizer of a worker's model."""
        path = _path_of(yard, worker) if tokens else ""
        if not path:
            return Text()
        with self._lock:
            kept = self._kept.get(path)
            if kept is None:
                return Text(is_loading=self._load_soon(path))
            kept.used_s = clock.monotonic()
            tokenizer = kept.tokenizer
        return Text(tokenizer.decode(tokens, skip_special_tokens=False)) if tokenizer else Text()

    def _load_soon(self, path: str) -> bool:
        """Begin to load it if there is room; whether it is being loaded."""
        if path in self._loading:
            return True
        if len(self._kept) + len(self._loading) >= _MOST_TOKENIZERS:
            since_s = clock.monotonic() - _UNUSED_S
            self._kept = {name: one for name, one in self._kept.items() if one.used_s > since_s}
        if len(self._kept) + len(self._loading) >= _MOST_TOKENIZERS:
            return False
        self._loading.add(path)
        threading.Thread(target=self._load, args=[path], daemon=True).start()
        return True

    def _load(self, path: str) -> None:
        tokenizer: Tokenizer | None = None
        try:
            tokenizer = load_tokenizer(path)
        except Exception as error:  # noqa: BLE001 - of any library that reads tokenizers
            log.warning("tokenizer %r: %s; token ids are shown", path, error)
        with self._lock:
            self._kept[path] = _Kept(tokenizer, clock.monotonic())
            self._loading.discard(path)


def _path_of(yard: Yard, worker: str) -> str:
    """The folder of the tokenizer of a worker's model, if it is on this host; else ""."""
    packed: Any = yard.connection.hget(yard.keys.workers, worker)
    try:
        path = decode_worker(packed).tokenizer if packed else ""
    except msgspec.MsgspecError:
        return ""
    return path if path and Path(path).is_absolute() and Path(path).is_dir() else ""
