"""The tokens of a running request: their number, and the last of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenyard.board.yard import Yard
from tokenyard.client.tokenization import Tokenizer, load_tokenizer
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.wire import unpack_tokens
from tokenyard.protocol.worker_info import decode_worker

#: Tokens that are read at a look, however many there are.
MOST_TOKENS: Final = 256
_TOKEN_BYTES: Final = 4
#: Tokenizers that are kept.
_MOST_TOKENIZERS: Final = 4


def last_tokens(yard: Yard, client: str, request_id: str) -> list[int]:
    """The last published tokens."""
    run: Any = yard.connection
    packed = run.getrange(yard.keys.tokens(client, request_id), -MOST_TOKENS * _TOKEN_BYTES, -1)
    return unpack_tokens(packed) if len(packed) % _TOKEN_BYTES == 0 else []


class Tokenizers:
    """Tokenizers of models whose files are on this host; each is loaded beside the first look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Tokenizer | None] = {}

    def text(self, yard: Yard, worker: str, tokens: Sequence[int]) -> str | None:
        """The text of tokens by the tokenizer of a worker's model; None: it is not here (yet)."""
        tokenizer = self._of(_path_of(yard, worker)) if tokens else None
        return tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer else None

    def _of(self, path: str) -> Tokenizer | None:
        if not path:
            return None
        with self._lock:
            if path not in self._known and len(self._known) < _MOST_TOKENIZERS:
                self._known[path] = None
                threading.Thread(target=self._load, args=[path], daemon=True).start()
            return self._known.get(path)

    def _load(self, path: str) -> None:
        try:
            tokenizer = load_tokenizer(path)
        except SettingsError:
            return  # ids are shown
        with self._lock:
            self._known[path] = tokenizer


def _path_of(yard: Yard, worker: str) -> str:
    """The folder of the tokenizer of a worker's model, if it is on this host; else ""."""
    packed: Any = yard.connection.hget(yard.keys.workers, worker)
    try:
        path = decode_worker(packed).tokenizer if packed else ""
    except msgspec.MsgspecError:
        return ""
    return path if path and Path(path).is_absolute() and Path(path).is_dir() else ""
