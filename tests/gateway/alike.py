"""Two servers' answers to one request, compared byte for byte but for ids and times.

`OWN` names every place of an answer that may differ, by endpoint, and what must stand there. An id
is replaced by its number in the answer, so that it must also stand wherever it stood.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
#: In `OWN`: seconds since 1970, of the time of the request.
TIME: Final = "time"
_HEX: Final = "[0-9a-f]{16}"
_ITEM: Final = {
    "<message>.id": f"msg_{_HEX}",
    "<function_call>.id": f"fc_{_HEX}",
    "<function_call>.call_id": f"(call_|chatcmpl-tool-){_HEX}",
}
_RESPONSE: Final = {
    ".id": f"resp_{_HEX}({_HEX})?",
    ".created_at": TIME,
    **{f".output[]{at}": form for at, form in _ITEM.items()},
}
_OF_ITEMS: Final = (
    *("content_part.added", "content_part.done", "output_text.delta", "output_text.done"),
    *("function_call_arguments.delta", "function_call_arguments.done"),
)
#: Dots part keys, `[]` stands for each entry of a list, `<...>` for the `type` of an object.
OWN: Final[Mapping[str, Mapping[str, str]]] = {
    COMPLETIONS: {"$.id": f"cmpl-{_HEX}({_HEX})?", "$.created": TIME},
    CHAT: {
        "$.id": f"chatcmpl-{_HEX}({_HEX})?",
        "$.created": TIME,
        "$.choices[].message.tool_calls[]<function>.id": f"chatcmpl-tool-{_HEX}",
        "$.choices[].delta.tool_calls[]<function>.id": f"chatcmpl-tool-{_HEX}",
    },
    RESPONSES: {
        **{f"${at}": form for at, form in _RESPONSE.items()},
        **{
            f"$<response.{event}>.response{at}": form
            for event in ("created", "in_progress", "completed")
            for at, form in _RESPONSE.items()
        },
        **{f"$<response.{event}>.item_id": f"(msg|fc)_{_HEX}" for event in _OF_ITEMS},
        **{
            f"$<response.output_item.{event}>.item{at}": form
            for event in ("added", "done")
            for at, form in _ITEM.items()
        },
    },
    MESSAGES: {
        "$<message>.id": f"chatcmpl-{_HEX}({_HEX})?",
        "$<message>.content[]<tool_use>.id": f"chatcmpl-tool-{_HEX}",
        "$<message_start>.message<message>.id": f"chatcmpl-{_HEX}({_HEX})?",
        "$<content_block_start>.content_block<tool_use>.id": f"chatcmpl-tool-{_HEX}",
    },
}


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event: its name, and its data with ids and times replaced."""

    name: str
    data: str

    @property
    def value(self) -> Any:
        """The data; the text itself at the end of a stream."""
        return self.data if self.data == "[DONE]" else json.loads(self.data)


@dataclass(slots=True)
class Asked:
    """One server's answer; raises `AssertionError` where an id or a time is missing or wrong."""

    status: int
    kind: str
    body: str  # with ids and times replaced; of a stream, ""
    events: list[Event] = field(default_factory=list)
    event_ids: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Asked:
        """Ask."""
        began = int(time.time())
        answer = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=90.0)
        masks = Masks(path, range(began, int(time.time()) + 1))
        kind = answer.headers["content-type"]
        if not kind.startswith("text/event-stream"):
            return cls(answer.status_code, kind, masks.replace(answer.text))
        found = cls(answer.status_code, kind, "")
        assert answer.text.endswith("\n\n")
        for block in answer.text.removesuffix("\n\n").split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines())
            found.event_ids += [fields.pop("id")] if "id" in fields else []
            name, data = fields.pop("event", ""), fields.pop("data")
            assert not fields, block
            found.events.append(Event(name, data if data == "[DONE]" else masks.replace(data)))
        return found


class Masks:
    """Replaces the ids and times of one answer."""

    def __init__(self, path: str, times: range) -> None:
        self._own = OWN.get(path, {})
        self._times = times
        self._ids: dict[str, str] = {}

    def replace(self, text: str) -> str:
        """The JSON text with its ids and times replaced, and nothing else changed."""
        found = json.loads(text)
        if "error" in found and len(found) <= 3:  # in Anthropic's form with a type and an id
            return text
        for at, name, value in _places(self._own, found, "$"):
            form = self._own[at]
            if form is TIME:
                assert value in self._times, f"{at}: {value!r}"
                text, count = re.subn(rf'("{name}": ?){value}\b', r'\g<1>"<time>"', text)
                assert count, at
            else:
                assert re.fullmatch(form, value), f"{at}: {value!r} is not {form}"
                shown = self._ids.setdefault(value, f"<id {len(self._ids)}>")
                text = text.replace(json.dumps(value), json.dumps(shown))
        return text


def _places(own: Mapping[str, str], value: Any, at: str) -> Iterator[tuple[str, str, Any]]:
    """Path, key and value of each id and time; a `KeyError` where one is missing."""
    if isinstance(value, list):
        for one in value:
            yield from _places(own, one, f"{at}[]")
    elif isinstance(value, dict):
        at = f"{at}<{value['type']}>" if isinstance(value.get("type"), str) else at
        for known in own:
            parent, _, name = known.rpartition(".")
            if parent == at:
                yield known, name, value[name]
        for name, one in value.items():
            yield from _places(own, one, f"{at}.{name}")


# Streams


def merges(ours: list[Event], theirs: list[Event]) -> int:
    """Compare two streams event by event; returns how many of ours are merged in theirs.

    vLLM merges the outputs of several steps into one where its API process falls behind its engine.
    Then as many of our events in sequence must come to the same. Events of several choices are
    compared choice by choice: their order among each other is that of the engine's steps.
    """
    if ours == theirs:
        return 0
    parts, others = _by_choice(ours), _by_choice(theirs)
    assert parts.keys() == others.keys()
    return sum(_merges(parts[index], others[index]) for index in parts)


def _by_choice(events: list[Event]) -> dict[int | None, list[Event]]:
    parts: dict[int | None, list[Event]] = {}
    for event in events:
        value = event.value
        choices = value.get("choices") if isinstance(value, dict) else None
        index = choices[0]["index"] if choices else None
        parts.setdefault(index, []).append(event)
    return parts


def _merges(ours: list[Event], theirs: list[Event]) -> int:
    if ours == theirs:
        return 0
    mine = [(one.name, _freed(one.value, at)) for at, one in enumerate(ours)]
    rest = iter(mine)
    for at, event in enumerate(theirs):
        expected = (event.name, _freed(event.value, at))
        first = got = next(rest, None)
        assert got is not None, f"event {at}: {expected} has no counterpart"
        while got != expected:
            more = next(rest, None)
            assert more is not None, f"event {at}: {first} is not the beginning of {expected}"
            assert more[0] == got[0], f"event {at}: {got} is not {expected}"
            got = got[0], joined(got[1], more[1])
    assert not list(rest)
    return len(ours) - len(theirs)


def _freed(value: Any, at: int) -> Any:
    """An event without what depends on merges.

    That is the number of an event of the Responses API, which must be its place, and the running
    usage: a token for which a parser writes nothing counts in the event that it is merged into.
    """
    if not isinstance(value, dict):
        return value
    assert value.get("sequence_number", at) == at
    left_out = {"sequence_number", *(["usage"] if value.get("choices") else [])}
    return {name: one for name, one in value.items() if name not in left_out}


#: Texts and lists that grow from event to event; of all else the last counts.
_GROWS: Final = {
    *("text", "content", "delta", "arguments", "partial_json", "token_ids", "logprobs"),
    *("tokens", "token_logprobs", "top_logprobs", "text_offset"),
}


def joined(first: Any, second: Any, name: str = "") -> Any:
    """What two events in sequence come to."""
    if first is None or second is None:
        return first if second is None else second
    if isinstance(first, dict) and isinstance(second, dict) and name != "usage":
        return first | {
            key: joined(first.get(key), one, key) if key in first else one
            for key, one in second.items()
        }
    if name in {"choices", "tool_calls"}:
        pairs = {one["index"]: one for one in first}
        for one in second:
            known = pairs.get(one["index"])
            pairs[one["index"]] = one if known is None else joined(known, one)
        return list(pairs.values())
    return first + second if name in _GROWS and type(first) is type(second) else second
