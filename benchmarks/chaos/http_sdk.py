"""One answer by OpenAI's SDK. It hides the ids of events: a cut stream is asked for from the start.

What comes then for the second time must be what came before.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from benchmarks.chaos.http_reader import READ_S, AskAgain, BrokenPromise, Piece, Reading
from benchmarks.cold_start.serve import HOST

_OWN: Final = ("model", "prompt", "max_tokens", "temperature", "stream", "seed")


def has_sdk() -> bool:
    """Whether the SDK is installed."""
    return importlib.util.find_spec("openai") is not None


@functools.cache
def _client(port: int, api_key: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"http://{HOST}:{port}/v1", api_key=api_key or "none", timeout=READ_S)


class SdkReading(Reading):
    """See `Reading`; the bytes are the SDK's to know."""

    def read(self, port: int) -> Iterator[Piece]:
        """Read it all at a gateway, and yield what is new."""
        from openai import APIConnectionError, APIError, APIStatusError

        body = dict(self.body)
        options: dict[str, Any] = {name: body.pop(name) for name in _OWN if name in body}
        headers = {"Idempotency-Key": self.key}
        try:
            answer = _client(port, self.api_key).completions.create(
                **options, extra_body=body, extra_headers=headers
            )
            self.is_accepted = True
            yield from self._pieces(answer if options["stream"] else [answer])
        except APIStatusError as error:
            self._refused(error.status_code, error.response.content)
        except APIConnectionError as error:
            raise AskAgain(f"{type(error).__name__}: {error}") from error
        except APIError as error:  # the last event of a stream whose request failed
            self.fail(str(error))

    def _pieces(self, chunks: Iterable[Any]) -> Iterator[Piece]:
        """What the chunks add to what is known."""
        tokens, text = 0, 0
        for chunk in chunks:
            choice = chunk.choices[0]
            piece = Piece(choice.token_ids or [], choice.text)
            known = Piece(
                self.tokens[tokens:][: len(piece.tokens)], self.text[text:][: len(piece.text)]
            )
            tokens, text = tokens + len(piece.tokens), text + len(piece.text)
            if not (_begins(piece.tokens, known.tokens) and _begins(piece.text, known.text)):
                raise BrokenPromise("wrong", f"{piece} instead of {known}")
            new = Piece(piece.tokens[len(known.tokens) :], piece.text[len(known.text) :])
            self.tokens += new.tokens
            self.text += new.text
            self.is_over = choice.finish_reason is not None
            yield new
        if not self.is_over:
            raise BrokenPromise("gap", f"the stream ends behind {tokens} tokens")


def _begins(whole: Sequence[Any], part: Sequence[Any]) -> bool:
    return whole[: len(part)] == part
