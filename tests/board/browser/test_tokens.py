"""A request of real vLLM: its tokens appear while they are generated."""

from __future__ import annotations

import re

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.stage import Stage
from tests.gateway.speaker import CYCLE

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(400)]


def test_tokens_appear_while_they_are_generated(
    new_window: NewWindow, board: str, speaking: Stage
) -> None:
    # Given a running request whose worker is stopped in the middle of its text
    window = new_window(board)
    with speaking.writing() as request_id:
        window.open(f"/request?client=web&id={request_id}")
        text = window.page.locator("#live_tokens pre")
        text.wait_for()
        shown = text.inner_text()
        assert "completed" not in window.page.locator("#live_state").inner_text()

    # If the worker goes on
    text.filter(has_not_text=re.compile(f"^{re.escape(shown)}$")).wait_for()

    # I expect more of the same text (of a fast model the page has the last tokens only, and a
    # character may be cut), and in the end the result, without a load of the page.
    first, second = (one.strip("\N{REPLACEMENT CHARACTER}") for one in (shown, text.inner_text()))
    assert first in CYCLE * 100
    assert second in CYCLE * 100
    assert len(second) > len(first)
    window.page.locator("#live_state", has_text="completed").wait_for()
    assert CYCLE[3:20] in window.page.locator("#live_result pre").inner_text()
