"""Who logs in with a key of each role, and what each is shown and refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.serving import serve
from tests.board.browser.window import Window
from tests.board.keyed import ROLES
from tests.support.api_keys import create_key
from tests.support.builders import make_request
from tests.support.processes import Plant
from tests.support.servers import Server
from tokenyard.board.page import RANK
from tokenyard.protocol.api_keys import Role

pytestmark = pytest.mark.long


class Keyed:
    """A board that asks for keys, and a key of each role."""

    def __init__(self, plant: Plant) -> None:
        self.url = serve(plant, keys="required")
        self.keys = {
            role: create_key(plant, "ops", name=f"a {role}", role=role)[0] for role in ROLES
        }

    def log_in(self, window: Window, role: Role) -> None:
        """Log in as a user does."""
        window.open("/requests")
        assert window.path == "/login"
        window.page.get_by_label("Key").fill(self.keys[role])
        window.page.get_by_role("button", name="Log in").click()
        window.page.wait_for_url("**/requests")


@pytest.fixture(scope="module")
def keyed(shared_server: object) -> Iterator[Keyed]:
    server: Server = shared_server("valkey")
    with Plant(server.url) as plant:
        plant.coordinator()
        plant.wait_for_leader()
        plant.push(make_request("waits", client="web", model="nobody-has-it"))
        yield Keyed(plant)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_sees_the_buttons_that_it_may_press(
    new_window: NewWindow, keyed: Keyed, role: Role
) -> None:
    window = new_window(keyed.url)
    keyed.log_in(window, role)
    assert f"a {role}" in window.page.locator(".actor").inner_text()
    cancels = window.page.locator("[formaction$='/do/request.cancel']")
    assert (cancels.count() > 0) == (RANK[role] >= RANK["operator"])


def test_a_wrong_key_opens_nothing(new_window: NewWindow, keyed: Keyed) -> None:
    window = new_window(keyed.url)
    window.open("/")
    window.page.get_by_label("Key").fill("ty-wrong")
    window.page.get_by_role("button", name="Log in").click()
    window.wait_for_text("This key is not valid")
    assert window.path == "/login"
    assert window.axe() == []


def test_after_logging_out_the_back_button_shows_nothing(
    new_window: NewWindow, keyed: Keyed
) -> None:
    window = new_window(keyed.url)
    keyed.log_in(window, "admin")
    window.page.get_by_role("button", name="Log out").click()
    window.page.wait_for_url("**/login")
    window.page.go_back()
    window.page.wait_for_url("**/login**")
