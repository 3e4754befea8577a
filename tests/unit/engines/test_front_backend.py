"""The warm-up of a front: it brings the first model of its core, once in the core's life."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from worker.engines import Memory
from worker.engines.vllm import backend
from worker.engines.vllm.grammars import GrammarLimits
from worker.engines.vllm.remote import RemoteBackend

TIMEOUT_S = 7.0


class Link:
    """A link to a core that is new, or has had its first model."""

    def __init__(self, *, is_settled: bool, calls: list[str]) -> None:
        self._is_settled = is_settled
        self._calls = calls

    def call(self, method: str) -> Any:
        self._calls.append(method)
        if method == "begin_warm_up":
            return None if self._is_settled else {"device": 1.0, "heap": 2.0}
        return Memory(host=1000) if method == "memory" else None


def warmed(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], *, is_settled: bool
) -> tuple[RemoteBackend, list[str]]:
    """A front after its warm-up, whose ``calls`` are noted, and the phases that it reports."""
    link = Link(is_settled=is_settled, calls=calls)
    monkeypatch.setitem(
        sys.modules,
        "worker.engines.vllm.core_link",
        SimpleNamespace(SocketLink=lambda *_: link),
    )
    monkeypatch.setattr(
        backend, "run_first_model", lambda _, timeout_s: calls.append(f"model, {timeout_s:g} s")
    )
    monkeypatch.setattr(backend, "settle", lambda: calls.append("settle here"))
    front = RemoteBackend(
        "/nowhere", timeout_s=TIMEOUT_S, log_stats=False, grammars=GrammarLimits()
    )
    return front, list(front.warm_up())


def test_the_front_of_a_new_core_brings_its_first_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    _, phases = warmed(monkeypatch, calls, is_settled=False)

    assert calls == ["begin_warm_up", "model, 7 s", "settle", "settle here"]
    assert phases == ["device", "heap", "first model"]


def test_a_front_that_replaces_another_leaves_the_model_of_its_core_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    _, phases = warmed(monkeypatch, calls, is_settled=True)

    assert calls == ["begin_warm_up"]
    assert phases == []


def test_a_front_counts_only_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a process with 500 bytes in memory, of which it shares 400 with the fork-server
    memory = SimpleNamespace(rss=500, uss=100)
    process = SimpleNamespace(memory_info=lambda: memory, memory_full_info=lambda: memory)
    monkeypatch.setattr("psutil.Process", lambda: process)
    front, _ = warmed(monkeypatch, [], is_settled=False)

    # If it takes 200 more
    memory.rss = 700

    # I expect its 300 bytes beside those of the core
    assert front.memory().host == 1300
