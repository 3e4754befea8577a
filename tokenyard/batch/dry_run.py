"""Checks a batch file without running it: invalid lines, tokens, and an estimate of the time.

Requests are prepared as in a real run. With a tokenizer prompts are counted; of chats only the
texts, because the worker applies the chat template. A yard adds its models, limits and rate.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec import Struct

from tokenyard.batch.answers import LineError
from tokenyard.batch.lines import BadLine
from tokenyard.batch.opening import scan_input
from tokenyard.batch.requests import check_params, line_request, read_input
from tokenyard.batch.state import BatchSpec
from tokenyard.client.build import RequestBuilder
from tokenyard.client.tokenization import Tokenizer
from tokenyard.protocol.chat import chat_texts
from tokenyard.protocol.errors import InvalidRequest
from tokenyard.protocol.wire import Request
from tokenyard.yard.snapshot import YardView

#: Lines are prepared in groups, because the tokenizer is faster on many.
_BURST: Final = 256
#: Invalid lines in the report; the others are only counted.
_MOST_FAULTS: Final = 100


class TokenCount(Struct):
    """The lengths of the prompts in tokens."""

    prompts: int = 0
    total: int = 0
    least: int = 0
    most: int = 0
    #: Prompts by the power of two that they are below: {"64": 3} are 3 with 32 to 63 tokens.
    below: dict[int, int] = {}

    def add(self, tokens: int) -> None:
        """Count one prompt."""
        self.least = min(self.least, tokens) if self.prompts else tokens
        self.most = max(self.most, tokens)
        self.prompts += 1
        self.total += tokens
        bound = 1 << tokens.bit_length()
        self.below[bound] = self.below.get(bound, 0) + 1


class Report(Struct, kw_only=True):
    """What a dry run found."""

    lines: int
    good: int = 0
    bad: int = 0
    faults: list[LineError] = []
    codes: dict[str, int] = {}  # bad lines by code
    forms: dict[str, int] = {}  # valid lines by the form of their answer
    tokens: TokenCount | None = None  # None without a tokenizer
    most_new_tokens: int = 0  # the sum of max_tokens of the lines that have it
    lines_per_s: float = 0.0  # of the yard, as last measured
    estimate_s: float | None = None
    notes: list[str] = []  # what could not be checked

    def accept(self, form: str) -> None:
        """Count a valid line."""
        self.good += 1
        self.forms[form] = self.forms.get(form, 0) + 1

    def refuse(self, line: int, code: str, message: str) -> None:
        """Count an invalid line."""
        self.bad += 1
        self.codes[code] = self.codes.get(code, 0) + 1
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(LineError(code, message, line))


_CHATS: Final = "of chats only the texts are counted, without the chat template"


@dataclass(frozen=True, slots=True)
class Fleet:
    """The properties of a yard that matter to a file."""

    models: frozenset[str] = frozenset()  # empty: unknown
    max_model_len: int = 0  # of its longest context; 0: unknown
    lines_per_s: float = 0.0
    tokenizer: str = ""  # a folder on this host
    max_request_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, view: YardView) -> Fleet:
        """Read them from a view of the yard."""
        infos = [worker.info for worker in view.workers if worker.is_ready and worker.info]
        held = {name for info in infos for name in (info.model, *info.adapters)}
        loadable = {
            name
            for host in (*view.hosts, *view.gone)
            for model in host.models
            for name in (model.name, *model.adapters)
        }
        # With two tokenizers, neither fits all lines.
        folders = {info.tokenizer for info in infos if Path(info.tokenizer or "?").is_dir()}
        limit = view.handshake.get("max_request_bytes", "0")
        return cls(
            models=frozenset(held | loadable),
            max_model_len=max((info.max_model_len for info in infos), default=0),
            lines_per_s=_number(view.handshake.get("rate", "0")),
            tokenizer=folders.pop() if len(folders) == 1 else "",
            max_request_bytes=int(limit) if limit.isdigit() else 0,
        )


def dry_run(spec: BatchSpec, fleet: Fleet, tokenizer: Tokenizer | None) -> Report:
    """Read a whole file; raises `UnreadableFile`, or `InvalidRequest` for bad ``params``."""
    builder = RequestBuilder("dry-run", tokenizer)
    builder.max_request_bytes = fleet.max_request_bytes
    check_params(spec)
    spec.check_columns()
    found = scan_input(spec)
    report = Report(lines=found.lines, notes=list(fleet.notes))
    if tokenizer is not None:
        report.tokens = TokenCount()
    asked = (
        line_request(spec, number, raw, "", is_repeated=number in found.repeated)
        for number, raw in read_input(spec)
    )
    while group := list(itertools.islice(asked, _BURST)):
        prepared_group = builder.prepare_many([each.item for each in group], {})
        for each, prepared in zip(group, prepared_group, strict=True):
            if isinstance(each.line, BadLine):
                report.refuse(each.number, each.line.code, each.line.message)
            elif isinstance(prepared, InvalidRequest):
                report.refuse(each.number, "INVALID_REQUEST", str(prepared))
            elif unfit := _unfit(prepared.request, report, fleet, tokenizer):
                report.refuse(each.number, *unfit)
            else:
                report.accept(each.line.form)
    if tokenizer is not None and report.forms.get("chat"):
        report.notes.append(_CHATS)
    _estimate(report, fleet)
    return report


def _unfit(
    request: Request, report: Report, fleet: Fleet, tokenizer: Tokenizer | None
) -> tuple[str, str] | None:
    """Why the yard cannot run a request, as code and message; the report counts its tokens."""
    if request.model and fleet.models and request.model not in fleet.models:
        return "MODEL_UNAVAILABLE", f"the yard has no model {request.model!r}"
    tokens = _prompt_tokens(request, tokenizer)
    if tokens is not None:
        if report.tokens is not None:
            report.tokens.add(tokens)
        if 0 < fleet.max_model_len <= tokens:
            message = f"{tokens} tokens, and the longest context has {fleet.max_model_len}"
            return "prompt_too_long", message
    report.most_new_tokens += (request.params.max_tokens or 0) * request.params.n
    return None


def _prompt_tokens(request: Request, tokenizer: Tokenizer | None) -> int | None:
    """The tokens of a prompt, of a chat only those of its texts; None if unknown."""
    if request.tokens is not None:
        return len(request.tokens) // 4
    if request.messages is None or tokenizer is None:
        return None
    texts = list(chat_texts(request.messages))
    return sum(len(ids) for ids in tokenizer.encode(texts)) if texts else 0


def _estimate(report: Report, fleet: Fleet) -> None:
    """Estimate the time from the rate of the yard while it was busy."""
    report.lines_per_s = fleet.lines_per_s
    if fleet.lines_per_s > 0:
        report.estimate_s = report.good / fleet.lines_per_s
    else:
        report.notes.append("no estimate: the rate of the yard is not known yet")
    if report.tokens is None:
        report.notes.append("prompts are not counted: give --tokenizer")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
