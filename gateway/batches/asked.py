"""What a client asks of a batch: the body of ``POST /v1/batches``."""

from __future__ import annotations

from typing import Any, Final

from gateway.batches.jobs import read_window
from gateway.batches.records import PREFIX, BatchRecord
from gateway.http.errors import invalid
from gateway.http.records import durable_id
from gateway.responses.options import PATH as RESPONSES_URL
from tokenyard.batch.lines import CHAT_URL, COMPLETIONS_URL

ENDPOINTS: Final = (CHAT_URL, COMPLETIONS_URL, RESPONSES_URL)
#: Seconds after which a file may expire, as OpenAI has them.
LIFETIMES_S: Final = range(3600, 30 * 86_400 + 1)
_FIELDS: Final = frozenset(
    {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}
)
#: OpenAI's limits of metadata.
_MOST_PAIRS: Final = 16
_LONGEST_KEY: Final = 64
_LONGEST_VALUE: Final = 512


def read_batch(body: dict[str, Any], client: str, key: str | None, now: int) -> BatchRecord:
    """The batch of a body, named by the idempotency key if there is one; raises `GatewayError`."""
    unknown = sorted(body.keys() - _FIELDS)
    if unknown:
        raise invalid(unknown[0][:80], "this server does not know this field")
    endpoint = body.get("endpoint")
    if endpoint not in ENDPOINTS:
        shown = f", not {endpoint[:80]!r}" if isinstance(endpoint, str) else ""
        raise invalid("endpoint", f"batches are for {', '.join(ENDPOINTS)}{shown}")
    window = _text(body, "completion_window")
    read_window(window)
    return BatchRecord(
        id=PREFIX + durable_id(client, None if key is None else f"batch/{key}"),
        input_file_id=_text(body, "input_file_id"),
        endpoint=endpoint,
        completion_window=window,
        created_at=now,
        metadata=_metadata(body.get("metadata")),
        output_expires_after_s=_lifetime(body.get("output_expires_after")),
    )


def _text(body: dict[str, Any], name: str) -> str:
    text = body.get(name)
    if not isinstance(text, str):
        raise invalid(name, "give a text")
    return text


def _lifetime(given: Any) -> int | None:
    if given is None:
        return None
    is_known = isinstance(given, dict) and given.keys() == {"anchor", "seconds"}
    if not is_known or given["anchor"] != "created_at":
        raise invalid("output_expires_after", "give `anchor`, which is `created_at`, and `seconds`")
    seconds = given["seconds"]
    if type(seconds) is not int or seconds not in LIFETIMES_S:
        raise invalid("output_expires_after", f"seconds: {LIFETIMES_S[0]} to {LIFETIMES_S[-1]}")
    return seconds


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > _MOST_PAIRS:
        raise invalid("metadata", f"give an object of at most {_MOST_PAIRS} pairs")
    for name, value in given.items():
        is_short = len(name) <= _LONGEST_KEY
        if not is_short or not isinstance(value, str) or len(value) > _LONGEST_VALUE:
            raise invalid(
                "metadata",
                f"keys have at most {_LONGEST_KEY} characters, and values are texts of at most "
                f"{_LONGEST_VALUE}",
            )
    return given
