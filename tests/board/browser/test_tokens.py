"""A request of real vLLM: its tokens appear while they are generated."""

from __future__ import annotations

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.stage import Stage
from tests.gateway.speaker import CYCLE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


def test_tokens_appear_while_they_are_generated(
    new_window: NewWindow, board: str, speaking: Stage
) -> None:
    window = new_window(board)
    request_id = speaking.speak()
    window.open(f"/request?client=web&id={request_id}")
    text = window.page.locator("#live_tokens pre")
    text.wait_for()
    seen = {text.inner_text()}

    while "completed" not in window.page.locator("#live_state").inner_text():
        seen.add(text.inner_text())
        window.page.wait_for_timeout(100)

    # The text grew several times, always by its end, without a reload.
    grown = sorted(seen, key=len)
    assert len(grown) >= 3
    assert grown[0][-20:] in CYCLE * 100
