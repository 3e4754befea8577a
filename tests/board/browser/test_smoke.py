"""The board of a yard with real vLLM, as a browser shows it: every page, live tokens, an action."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.serving import serve
from tests.gateway.speaker import CYCLE, MAX_LEN
from tests.gateway.stand import Stand
from tests.support.builders import make_request, random_name
from tests.support.processes import Plant
from tests.support.waiting import eventually
from tokenyard.board.pages import PAGES
from tokenyard.ops.control import Signals
from tokenyard.protocol.control import Order, model_scope
from tokenyard.protocol.wire import SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@contextmanager
def kept_in_the_middle(plant: Plant) -> Iterator[str]:
    """A request whose worker is paused, until the block ends, when a part of its text is there."""
    signals, scope = Signals(plant), model_scope("speaker")
    params = SamplingParams(max_tokens=MAX_LEN - 50, temperature=0.0)
    state, name = "", ""
    while state != "assigned":  # else it was over before
        signals.give(Order(signal="UNPAUSE", scope=scope))
        name = random_name("story")
        request = make_request(name, prompt="abc", model="speaker", client="web", stream=True)
        plant.push(msgspec.structs.replace(request, params=params))
        eventually(lambda name=name: plant.published(name, "web") >= 3, timeout_s=120.0)
        paused = signals.give(Order(signal="PAUSE", scope=scope, mode="keep"))
        assert signals.wait(paused, 120.0) == []
        state = plant.ledger(name, "web")["state"]
    try:
        yield name
    finally:
        signals.give(Order(signal="UNPAUSE", scope=scope))


def test_pages_are_shown_and_a_text_that_is_being_written_is_cancelled(
    stand: Stand, new_window: NewWindow
) -> None:
    window = new_window(serve(stand.plant, content="viewer"))
    for page in PAGES:
        if page.menu:
            assert window.open(page.path).status == 200
            assert window.page.title().startswith(page.title)
            assert window.page.locator("nav [aria-current=page]").inner_text() == page.menu
            assert window.axe() == []
    # Given a request that stays in the middle of its text
    with kept_in_the_middle(stand.plant) as name:
        window.open(f"/request?client=web&id={name}")
        text = window.page.locator("#live_tokens pre")
        text.wait_for(timeout=120_000)  # the board loads the tokenizer
        assert text.inner_text()[:20] in CYCLE * 2
        # If somebody cancels it there
        window.page.locator("main").get_by_role("button", name="Cancel", exact=True).click()
        window.page.wait_for_url("**/do/**")
        window.page.get_by_label("Why", exact=True).fill("a test")
        window.page.locator("form.fields button").click()
        window.page.wait_for_url(lambda url: "/do/" not in url)
    # I expect the page to say so.
    window.page.locator("#live_state", has_text="cancelled").wait_for()
    assert stand.plant.ledger(name, "web")["state"] == "cancelled"
