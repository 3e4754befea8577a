"""Large bodies are validated up to their first fault, and rendered beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest
from pydantic import ValidationError

from gateway.announcements import ModelProfile
from gateway.http.context import CURRENT, RequestContext
from gateway.http.errors import GatewayError, unavailable
from gateway.http.incoming import inner_scope, replay
from tests.engines.harness import MODELS
from tests.unit.gateway.conftest import adder_tokenizer
from tokenyard.protocol.media import NO_MEDIA, Media
from tokenyard.protocol.wire import Request

CHAT = "/v1/chat/completions"
#: A schema that takes minutes to compile.
LARGE: dict[str, Any] = {"type": "string", "enum": [f"one of many {n}" for n in range(12_000)]}


def _rules(count: int) -> str:
    """A grammar of Lark's, which xgrammar does not know: llguidance recurses from rule to rule."""
    rules = "".join(f'r{n}: "1" r{n + 1}\n' for n in range(count))
    return f'start: r0\n{rules}r{count}: "1"\n'


def _tag(count: int) -> str:
    structures = [{"begin": f"<{n}>", "schema": LARGE | {"enum": ["a"]}} for n in range(count)]
    whole = [one | {"end": "</>"} for one in structures]
    return json.dumps({"type": "structural_tag", "structures": whole, "triggers": ["<"]})


class Queue:
    """Refuses what is asked of it when so much is, and keeps it and in which thread that was."""

    def __init__(self, count: int = 1) -> None:
        self.asked: list[Request] = []
        self.media: list[Media | None] = []
        self.is_known = False
        self.threads: list[threading.Thread] = []
        self.count = count
        self.all_asked = asyncio.Event()

    async def has(self, _: Request) -> bool:
        return self.is_known

    async def ask(
        self, request: Request, _: Any, media: Media | None = NO_MEDIA
    ) -> AsyncGenerator[Any, None]:
        self.asked.append(request)
        self.media.append(media)
        self.threads.append(threading.current_thread())
        if len(self.asked) == self.count:
            self.all_asked.set()
        await asyncio.wait_for(self.all_asked.wait(), 30)
        raise unavailable("the queue was asked")
        yield


async def front_end(queue: Queue, model: ModelProfile | None = None, *domains: str) -> Any:
    """vLLM's app before a queue, with one model: by default the smallest example.

    It fetches media from ``domains``.
    """
    adder_tokenizer()  # sets vLLM's environment first
    from gateway.frontend.fetching import MediaFetcher
    from gateway.frontend.models import STATE, FrontEnds

    front_ends = FrontEnds(cast(Any, queue), fetcher=MediaFetcher(domains))
    state = await front_ends.state_of(model or ModelProfile("adder", str(MODELS / "adder")))
    STATE.set(state)
    return front_ends.app


async def answer(app: Any, path: str, body: Any) -> tuple[int, str]:
    """Status and body of vLLM's app."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def never() -> Any:
        await asyncio.Event().wait()

    CURRENT.set(RequestContext(durable_id="a" * 32, client="me", created=1.0))
    try:
        await app(inner_scope(path, "a" * 32), replay(json.dumps(body).encode(), never), send)
    except Exception as error:  # noqa: BLE001 - Starlette raises what it has answered
        return 500, str(error)
    return messages[0]["status"], b"".join(one.get("body", b"") for one in messages).decode()


async def ask(path: str, body: dict[str, Any], count: int = 1) -> tuple[int, str, Queue]:
    """Status and body of the last of so many equal requests at a time, and what was asked."""
    queue = Queue(count)
    app = await front_end(queue)
    asked = (answer(app, path, {"model": "adder"} | body) for _ in range(count))
    return *(await asyncio.gather(*asked))[-1], queue


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{}] * 2000}),
        (CHAT, {"messages": [{"role": 1}] * 2000}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": 1}] * 2000}]}),
        (CHAT, {"messages": [], "tools": [{"type": 1}] * 2000}),
        ("/v1/messages/count_tokens", {"messages": [65] * 2000}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [65] * 2000}]}),
        (CHAT, {"messages": [], "vllm_xargs": {str(n): {} for n in range(2000)}}),
    ],
)
async def test_a_list_is_validated_up_to_its_first_fault(path: str, body: dict[str, Any]) -> None:
    status, text, queue = await ask(path, body)
    assert status == 400
    assert int(json.loads(text)["error"]["message"].split()[0]) < 500  # errors
    assert not queue.asked


@pytest.mark.parametrize("count", [1, 200])
async def test_the_queue_is_asked_from_the_first_loop(count: int) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "1"}]}] * count
    _, text, queue = await ask(CHAT, {"messages": chat, "max_completion_tokens": 1})
    assert "the queue was asked" in text
    assert queue.threads == [threading.current_thread()]


async def test_a_client_waits_for_its_large_bodies_but_not_for_their_answers() -> None:
    chat = [{"role": "user", "content": "1"}] * 200
    count = 40
    _, text, queue = await ask(CHAT, {"messages": chat, "max_completion_tokens": 1}, count)
    assert "the queue was asked" in text
    assert len(queue.asked) == count


@pytest.mark.parametrize(
    "constraint",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LARGE}}},
        {"structured_outputs": {"choice": LARGE["enum"]}},
        {"structured_outputs": {"regex": "a" * 200_000}},
        {"structured_outputs": {"structural_tag": _tag(2000)}},
    ],
    ids=["schema", "choice", "regex", "tag"],
)
async def test_a_large_constraint_is_refused_before_it_is_read(
    constraint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    adder_tokenizer()
    from vllm.v1.structured_output import backend_xgrammar as backend

    monkeypatch.setattr(backend, "validate_xgrammar_grammar", lambda _: pytest.fail("it is read"))
    body = {"messages": [{"role": "user", "content": "1"}], "max_completion_tokens": 1}
    _, text, queue = await ask(CHAT, body | constraint)
    (name,) = constraint
    assert f"{name}: the constraint has " in text
    assert "at most 131072 are taken (max_grammar_bytes)" in text
    assert not queue.asked


async def test_a_large_constraint_that_vllm_makes_itself_is_refused() -> None:
    adder_tokenizer()
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output import backend_xgrammar as backend

    await ask(CHAT, {"messages": []})
    params = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=_tag(2000)))
    with pytest.raises(GatewayError, match="at most 131072 are taken"):
        backend.validate_xgrammar_grammar(params)


async def test_what_vllm_makes_of_a_body_is_validated_item_by_item() -> None:
    adder_tokenizer()
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    await ask(CHAT, {"messages": []})
    wrong: Any = [{"role": 1}] * 2000
    with pytest.raises(ValidationError) as raised:
        ChatCompletionRequest(messages=wrong)
    assert raised.value.error_count() < 500


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        ({"grammar": _rules(6000)}, ""),
        (
            {"json": json.dumps({"type": "string", "pattern": "(" * 60_000 + "a" + ")" * 60_000})},
            "",
        ),
        ({"regex": "(" * 120_000}, "invalid regex"),
    ],
    ids=["rules", "pattern", "regex"],
)
async def test_no_grammar_ends_the_process(constraint: dict[str, Any], why: str) -> None:
    chat = {"messages": [{"role": "user", "content": "1"}], "max_completion_tokens": 1}
    _, text, queue = await ask(CHAT, chat | {"structured_outputs": constraint})
    assert (why or "the queue was asked") in text
    assert bool(queue.asked) is not bool(why)


def test_what_a_template_shows_as_json_is_the_same_in_any_thread() -> None:
    from gateway.frontend.door import dumps

    value = {"é": [1, None, {"a": 0.1}], "b": "\n<"}
    options = {"ensure_ascii": False, "indent": None, "separators": None, "sort_keys": False}
    there: list[str] = []
    thread = threading.Thread(target=lambda: there.append(dumps(value, **options)))
    thread.start()
    thread.join()
    assert there == [dumps(value, **options)] == [json.dumps(value, **options)]


@pytest.mark.parametrize(("numbers", "by"), [(1000, "c"), (20_000, "python")])
def test_a_small_answer_is_written_by_c_in_any_thread(
    monkeypatch: pytest.MonkeyPatch, numbers: int, by: str
) -> None:
    from gateway.frontend import door

    monkeypatch.setattr(door, "dumps_in_python", lambda *_, **__: "python")
    answer = {"data": [{"embedding": [1] * 500}] * (numbers // 500)}
    written: list[str] = []
    thread = threading.Thread(target=lambda: written.append(door.dumps(answer)))
    thread.start()
    thread.join()
    assert written == [json.dumps(answer) if by == "c" else "python"]


async def test_a_large_body_is_rendered_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    adder_tokenizer()
    from vllm.renderers.hf import HfRenderer

    seen: list[str] = []
    render = HfRenderer.render_messages_async

    async def watched(renderer: Any, *arguments: Any) -> Any:
        seen.append(threading.current_thread().name)
        return await render(renderer, *arguments)

    monkeypatch.setattr(HfRenderer, "render_messages_async", watched)
    for count in (1, 200):
        await ask(CHAT, {"messages": [{"role": "user", "content": "1"}] * count})
    assert seen == [threading.current_thread().name, "side-loop"]
