"""Prompts of chats equal those of `vllm.LLM.chat`, token by token; docs/parity.md has the table.

The tests ask vLLM's own `LLM.chat`; only its engine is missing, so they need no weights. Set
TOKENYARD_WRITE_DOCS=1 to rewrite the table.
"""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.engines.chats import CASES, REFUSED, STRICTER, STYLES, Case, call, say, write_model
from tests.engines.harness import spec_of
from tests.engines.on_cpu import ON_CPU
from tests.support.builders import make_assignment
from tokenyard.protocol.chat import MEDIA_PARTS, RESERVED_KWARGS, TEXT_PARTS
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.parse import parse_request, read_chat_options
from tokenyard.protocol.wire import PLAIN_CHAT, Request, request_fields
from worker.engines.vllm.environment import engine_environment, set_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "parity.md"
BEGIN, END = "<!-- chat: begin -->", "<!-- chat: end -->"
NOON = datetime.datetime(2031, 2, 3, 12, tzinfo=datetime.UTC)
NOON_MS = int(NOON.timestamp() * 1000)

Render = Callable[[Case], list[int]]


class Refusal(Exception):
    """The worker or `LLM.chat` refuses a chat."""


class Pair:
    """One model with both ways to a prompt: `LLM.chat`, and the worker's."""

    def __init__(self, folder: Path) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.tokenizers import registry

        from worker.engines.vllm.arguments import engine_config
        from worker.engines.vllm.tokenizer import ChatPrompts

        config = engine_config(spec_of("parity", folder, max_num_seqs=1), 0, None, "")
        renderers = []
        for _ in range(2):  # neither sees changes that the other makes to its tokenizer
            registry.cached_get_tokenizer.cache_clear()
            renderers.append(renderer_from_config(config))
        self._llm = _without_engine(renderers[0], config.model_config)
        self._chat = ChatPrompts(renderers[1], config.model_config.max_model_len)
        self.tokenizer: Any = renderers[1].get_tokenizer()

    def vllm(self, case: Case) -> list[int]:
        """The prompt of `LLM.chat`."""
        from vllm import SamplingParams

        given = copy.deepcopy(case.options)
        if "documents" in given:  # as vLLM's server passes them
            given["chat_template_kwargs"] = {"documents": given.pop("documents")}
        try:
            self._llm.chat(copy.deepcopy(case.messages), SamplingParams(), use_tqdm=False, **given)
        except Exception as error:
            raise Refusal(str(error)) from error
        [prompt] = self._llm.prompts
        return prompt

    def rendered(self, request: Request, accepted_ms: int = NOON_MS) -> list[int]:
        """The worker's prompt for a chat that was accepted then."""
        return self._chat.request(make_assignment(request, sid=f"normal/{accepted_ms}-0")).prompt

    def ours(self, case: Case) -> list[int]:
        """The worker's prompt for the chat that came over the wire."""
        try:
            return self.rendered(over_the_wire(case))
        except InvalidRequest as error:
            raise Refusal(str(error)) from error


def over_the_wire(case: Case) -> Request:
    """The chat as a worker reads it; raises `InvalidRequest`."""
    chat = read_chat_options(case.options) if case.options else PLAIN_CHAT
    fields = request_fields(Request(id="q", messages=case.messages, chat=chat))
    raw = {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in fields.items()
    }
    read = parse_request(raw)
    if isinstance(read, Request):
        return read
    raise InvalidRequest(*str(getattr(read, "message", read)).split(": ", 1))


def _without_engine(renderer: Any, model_config: Any) -> Any:
    """A `vllm.LLM` that records the prompts instead of running them."""
    from vllm import LLM

    class Noting(LLM):  # type: ignore[misc]
        def __init__(self) -> None:
            self.renderer = renderer
            self.model_config = model_config
            self.chat_template = None
            self.prompts: list[list[int]] = []

        def _render_and_add_requests(self, prompts: Any, **_: Any) -> list[str]:
            self.prompts = [list(prompt["prompt_token_ids"]) for prompt in prompts]
            return []

        def _run_engine(self, *_: Any, **__: Any) -> list[Any]:
            return []

    return Noting()


@pytest.fixture(scope="module")
def pair_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str | None], Pair]]:
    """The pair for a style of template, or for no template; the clock is at noon."""
    set_environment(engine_environment(cpu=ON_CPU))
    import transformers.utils.chat_template_utils as templates

    class Noon(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Noon:
            return cls(NOON.year, NOON.month, NOON.day, NOON.hour)

    made: dict[str | None, Pair] = {}

    def get(style: str | None) -> Pair:
        if style not in made:
            made[style] = Pair(write_model(tmp_path_factory.mktemp("model"), style))
        return made[style]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(templates, "datetime", Noon)
        # A compiled template keeps the clock of its compilation.
        templates._compile_jinja_template.cache_clear()
        yield get
    templates._compile_jinja_template.cache_clear()


def outcome(render: Render, case: Case) -> list[int] | None:
    """The prompt, or None if it is refused."""
    try:
        return render(case)
    except Refusal:
        return None


def compare(pair: Pair, style: str, column: str) -> str:
    """The entry of the table; fails if the two differ."""
    cells = set()
    for number, case in enumerate(CASES[column]):
        theirs, ours = outcome(pair.vllm, case), outcome(pair.ours, case)
        what = f"{style}, {column}, chat {number}"
        assert ours == theirs, (
            f"{what}: {pair.tokenizer.decode(ours or [])!r} is not "
            f"{pair.tokenizer.decode(theirs or [])!r}"
        )
        if theirs is None:
            cells.add("refused alike")
        elif all(text in pair.tokenizer.decode(theirs) for text in case.shown):
            cells.add("same")
        else:
            cells.add("same, not shown")
    return "; ".join(sorted(cells, reverse=True))


def the_table(pair_of: Callable[[str | None], Pair]) -> str:
    """The section for the page: what was compared, and every outcome that is not "same"."""
    compared = f"Templates in the style of {', '.join(STYLES.values())}. Chats: {', '.join(CASES)}."
    lines = TextWrapper(100, break_on_hyphens=False).wrap(compared)
    lines += ["", "| chats | templates | |", "|---|---|---|"]
    for column in CASES:
        styles: dict[str, list[str]] = {}
        for style, name in STYLES.items():
            styles.setdefault(compare(pair_of(style), style, column), []).append(name)
        styles.pop("same", None)
        lines += [f"| {column} | {', '.join(names)} | {cell} |" for cell, names in styles.items()]
    lines += ["", "| refused here | what `LLM.chat` does |", "|---|---|"]
    lines += [f"| {what} | {instead} |" for what, (_, instead) in STRICTER.items()]
    return "\n".join(lines)


def test_the_table_of_the_page_is_current(pair_of: Callable[[str | None], Pair]) -> None:
    found = the_table(pair_of)

    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    written, _, after = rest.partition(END)
    explained, mark, _ = written.partition("\nTemplates in")
    assert mark
    if os.environ.get("TOKENYARD_WRITE_DOCS") == "1":
        PAGE.write_text(f"{before}{BEGIN}{explained}\n{found}\n{END}{after}", encoding="utf-8")
        return
    assert written.removeprefix(explained).strip() == found, (
        "run it again with TOKENYARD_WRITE_DOCS=1, and read what has changed"
    )


def test_most_chats_of_the_table_give_a_prompt(pair_of: Callable[[str | None], Pair]) -> None:
    """Otherwise the two could agree by refusing everything."""
    for style in STYLES:
        taken = [column for column in CASES if compare(pair_of(style), style, column) == "same"]
        assert {"plain", "parts", "kwargs"} <= set(taken), style
        assert len(taken) >= 4, style


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("style", ["llama-3", "llama-4"])
def test_both_refuse_a_chat_that_no_template_could_take(
    pair_of: Callable[[str | None], Pair], style: str, what: str
) -> None:
    pair = pair_of(style)
    with pytest.raises(Refusal):
        pair.vllm(REFUSED[what])
    with pytest.raises(Refusal):
        pair.ours(REFUSED[what])


@pytest.mark.parametrize("what", STRICTER)
def test_the_worker_alone_refuses_some_chats(
    pair_of: Callable[[str | None], Pair], what: str
) -> None:
    case, _ = STRICTER[what]
    pair = pair_of("qwen-2.5")
    assert pair.vllm(case)
    with pytest.raises(Refusal):
        pair.ours(case)


def test_a_model_without_a_chat_template_refuses_with_that_reason(
    pair_of: Callable[[str | None], Pair],
) -> None:
    case = CASES["plain"][0]
    with pytest.raises(Refusal):
        pair_of(None).vllm(case)
    with pytest.raises(Refusal, match="messages: this model has no chat template"):
        pair_of(None).ours(case)


def test_a_refusal_quotes_the_reason_of_the_template(pair_of: Callable[[str | None], Pair]) -> None:
    with pytest.raises(Refusal, match=r"messages: .*System role not supported"):
        pair_of("gemma-2").ours(CASES["system"][0])


def test_every_attempt_has_the_same_date(pair_of: Callable[[str | None], Pair]) -> None:
    # Given a template that writes the date
    pair = pair_of("gpt-oss")
    request = over_the_wire(CASES["plain"][0])

    # If a request of the last day of a year is rendered at any later time
    prompt = pair.rendered(request, 1_924_991_999_000)

    # I expect that day in its prompt.
    assert "Current date: 2030-12-31" in pair.tokenizer.decode(prompt)


def test_rendering_leaves_the_request_unchanged(pair_of: Callable[[str | None], Pair]) -> None:
    """vLLM changes arguments in place, and the worker counts the bytes of a request twice."""
    case = Case([say("user", "x"), say("assistant", None, tool_calls=[call('{"city": "Kiew"}')])])
    request = over_the_wire(case)
    work = request.work

    first = pair_of("hermes").rendered(request)

    assert pair_of("hermes").rendered(request) == first
    assert (request.messages, request.work) == (case.messages, work)


def test_an_over_long_chat_is_refused_before_it_is_tokenized(
    pair_of: Callable[[str | None], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("llama-3")
    monkeypatch.setattr(pair._chat, "_encode", None)
    with pytest.raises(InvalidRequest, match=r"messages: has 500.* characters, more than 4096"):
        pair.rendered(over_the_wire(Case([say("user", "x" * 500_000)])))


def test_part_types_equal_those_of_vllm(pair_of: Callable[[str | None], Pair]) -> None:
    pair_of("llama-3")  # sets the environment for the import of vLLM
    from vllm.renderers import chat_utils

    assert set(TEXT_PARTS) == set(chat_utils._TEXT_CONTENT_PART_TYPES)
    assert set(MEDIA_PARTS) == set(chat_utils._MEDIA_CONTENT_PART_KEYS)


def test_reserved_names_are_the_arguments_of_the_functions_in_between(
    pair_of: Callable[[str | None], Pair],
) -> None:
    import inspect

    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    taken = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    taken |= set(inspect.signature(chat_template_utils.render_jinja_template).parameters)
    compiled = chat_template_utils._compile_jinja_template("{{ messages }}")
    assert {"raise_exception", "strftime_now"} <= set(compiled.environment.globals)
    assert taken | {"messages", "raise_exception", "strftime_now"} == RESERVED_KWARGS
