"""Each action once, as an operator does it: pressed on its page, confirmed, and done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.board.browser.conftest import NewWindow
from tests.board.browser.serving import serve
from tests.board.browser.stage import TENANTS, Stage, staged
from tests.board.browser.window import Window
from tests.support.servers import Server
from tests.support.waiting import eventually
from tokenyard.board.operations import OPERATIONS
from tokenyard.ops.audit import read_audit
from tokenyard.ops.control import Signals
from tokenyard.ops.keys import list_keys
from tokenyard.protocol.tenants import decode_tenant

pytestmark = pytest.mark.long

WHY = "a test presses <b>all</b> buttons"


class Operator:
    """An operator at the board of a yard with simulated engines."""

    def __init__(self, stage: Stage, window: Window) -> None:
        self.stage = stage
        self.plant = stage.plant
        self.window = window
        self.page = window.page
        self.confirmed: str = ""  # what the page that asked has said

    def open(self, path: str) -> None:
        """Open a page of the board."""
        assert self.window.open(path).status == 200

    def press(self, button: str, /, within: str = "main", **fields: str) -> str:
        """Press a button, fill in what is asked, confirm; what the board says then."""
        self.page.locator(within).get_by_role("button", name=button, exact=True).first.click()
        self.page.wait_for_url("**/do/**")
        assert self.window.axe() == []
        self.confirmed = self.window.text()
        for label, value in fields.items():
            field = self.page.locator(f"#field_{label}")
            is_list = field.evaluate("(one) => one.tagName === 'SELECT'")
            field.select_option(value) if is_list else field.fill(value)
        self.page.get_by_label("Why", exact=True).fill(WHY)
        self.page.locator("form.fields button").click()
        self.page.wait_for_url(lambda url: "/do/" not in url or "create" in url)
        return self.window.text()

    def hget(self, key: str, field: str) -> bytes | None:
        """A field of a hash."""
        found: Any = self.plant.connection.hget(key, field)
        return found

    def states(self, model: str) -> list[str]:
        """The states of the workers that have a model."""
        return [one.state for one in self.plant.roster().values() if one.model == model]


@pytest.fixture(scope="module")
def served(
    shared_server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stage, str]]:
    server: Server = shared_server("valkey")
    folder: Path = tmp_path_factory.mktemp("operator")
    with staged(server, folder, with_vllm=False) as stage:
        yield stage, serve(stage.plant)


@pytest.fixture
def operator(served: tuple[Stage, str], new_window: NewWindow) -> Operator:
    stage, url = served
    return Operator(stage, new_window(url))


@pytest.fixture(scope="module", autouse=True)
def every_action_is_pressed(served: tuple[Stage, str]) -> Iterator[None]:
    """After the last test, the audit has an entry of each action, with its reason."""
    yield
    plant = served[0].plant
    entries = read_audit(plant, most=1000)
    assert {one.action for one in entries if one.why == WHY} >= set(OPERATIONS)


def test_cancel_selected_requests(operator: Operator) -> None:
    operator.stage.submit("llama-3.1-8b", 3, 4000, client="chosen")
    operator.open("/requests?client=chosen")
    boxes = operator.page.locator("[name=request]")
    boxes.nth(0).check()
    boxes.nth(2).check()

    told = operator.press("Cancel")

    assert "2" in operator.confirmed
    assert "2" in told
    ids = [f"chosen-0{at:03d}" for at in range(3)]
    eventually(
        lambda: (
            [operator.plant.ledger(one, "chosen").get("state") for one in ids].count("cancelled")
            == 2
        )
    )


def test_cancel_all_requests_that_match(operator: Operator) -> None:
    operator.stage.submit("llama-3.1-8b", 4, 4000, client="matching")
    operator.open("/requests?client=matching")

    operator.press("Cancel all")

    assert "4" in operator.confirmed
    last = operator.plant.result("matching-0003", "matching")
    assert last.status == "cancelled"


def test_requeue_dead_letters(operator: Operator) -> None:
    operator.stage.bury("again", "mistral-7b", "POISONED: 2 workers crashed while it ran alone")
    operator.open("/dead?text=again")
    operator.page.locator("[name=letter]").check()

    operator.press("Requeue", within="#chosen")

    assert operator.plant.result("again", "nightly").ok


def test_requeue_a_request_from_its_own_page(operator: Operator) -> None:
    failed = operator.stage.fail("failed-1")

    operator.open(f"/request?client=web&id={failed}")
    operator.press("Requeue")

    eventually(
        lambda: operator.plant.ledger(failed, "web").get("state") in {"assigned", "completed"}
    )


def test_drop_all_dead_letters_that_match(operator: Operator) -> None:
    for number in range(3):
        operator.stage.bury(f"gone-{number}", "mistral-7b", "INFERENCE_ERROR: failed 3 times")
    operator.stage.bury("stays", "mistral-7b", "POISONED: 2 workers crashed while it ran alone")
    operator.open("/dead?text=gone-")

    operator.press("Drop all")

    assert "3" in operator.confirmed
    operator.open("/dead")
    assert "gone-" not in operator.window.text()
    assert "stays" in operator.window.text()


def test_set_and_remove_a_tenant(operator: Operator) -> None:
    tenants = operator.plant.keys.tenants
    operator.open("/tenants/product")
    operator.press("Set", weight="7")
    changed = operator.hget(tenants, "product")
    assert changed is not None
    assert decode_tenant(changed).weight == 7
    assert decode_tenant(changed).max_running_requests == TENANTS["product"].max_running_requests

    operator.press("Remove settings")
    assert operator.hget(tenants, "product") is None


def test_a_wrong_value_can_be_corrected_where_it_was_typed(operator: Operator) -> None:
    operator.open("/tenants/research")
    page = operator.page
    page.get_by_role("button", name="Set", exact=True).first.click()
    page.wait_for_url("**/do/**")
    page.locator("#field_weight").fill("heavy")
    page.locator("#field_max_tokens").fill("77")
    page.get_by_label("Why", exact=True).fill("a test")
    page.locator("form.fields button").click()
    page.get_by_role("alert").wait_for()

    assert operator.window.axe() == []
    focused = "document.activeElement.id + ' ' + document.activeElement.value"
    assert page.evaluate(focused) == "field_weight heavy"
    assert page.locator("#field_max_tokens").input_value() == "77"
    assert page.get_by_label("Why", exact=True).input_value() == "a test"
    page.locator("#field_weight").fill("2")
    page.locator("form.fields button").click()
    page.wait_for_url(lambda url: "/do/" not in url)

    packed = operator.hget(operator.plant.keys.tenants, "research")
    assert packed is not None
    settings = decode_tenant(packed)
    assert (settings.weight, settings.max_tokens) == (2, 77)


def test_create_a_key_which_is_shown_once_and_revoke_it(operator: Operator) -> None:
    operator.open("/keys")
    operator.press("Create a key", tenant="research", name="laptop")
    secret = operator.page.locator(".secret").inner_text()
    assert operator.window.axe() == []
    [(key_id, key)] = list_keys(operator.plant).items()
    assert (key.tenant, key.name) == ("research", "laptop")

    operator.open("/keys")
    assert secret not in operator.page.content()
    operator.page.locator(f"[value='{key_id}']").check()
    operator.press("Revoke selected")
    assert list_keys(operator.plant) == {}


def test_load_sleep_wake_reload_and_unload_a_model(operator: Operator) -> None:
    model, row = "mistral-7b", "#live_models tr:has(a:text-is('mistral-7b'))"
    operator.open("/models")
    operator.press("Load", within=row)
    eventually(lambda: "ready" in operator.states(model))
    for name, state in (("Sleep", "asleep"), ("Wake", "ready")):
        operator.open("/models")
        operator.press(name, within=row)
        eventually(lambda state=state: state in operator.states(model))
    operator.open("/models")
    operator.press("Reload", within=row, path="/weights/next")
    operator.open("/models")
    operator.press("Unload", within=row)
    eventually(lambda: operator.states(model) == [])


def test_set_an_epoch(operator: Operator) -> None:
    operator.open("/model?name=mistral-7b")
    operator.press("Set epoch", epoch="7")
    states = Signals(operator.plant).desired_states().by_scope
    assert states["model:mistral-7b"].epoch == 7


def test_pause_suspend_resume_unpause_drain_and_stop_workers(operator: Operator) -> None:
    operator.stage.submit("llama-3.1-8b", 1, 1, client="first")
    operator.plant.result("first-0000", "first")

    def run_states() -> set[str]:
        return {one.run_state for one in operator.plant.roster().values() if one.model}

    everybody = "#live_scopes tr:has(th:text-is('all workers'))"
    for name, state in (
        ("Pause", "PAUSED"),
        ("Suspend", "SUSPENDED"),
        ("Resume", "PAUSED"),
        ("Unpause", "RUNNING"),
    ):
        operator.open("/signals")
        operator.press(name, within=everybody)
        eventually(lambda state=state: run_states() == {state})
    for name, worker in (("Drain", "gpu-a-4"), ("Stop", "gpu-a-3")):
        operator.open(f"/devices/{worker}")
        operator.press(name)
        eventually(
            lambda worker=worker: (
                worker not in {one.name for one in operator.plant.roster().values()}
            )
        )


def test_empty_the_intakes(operator: Operator) -> None:
    everybody = "#live_scopes tr:has(th:text-is('all workers'))"
    operator.open("/signals")
    operator.press("Pause", within=everybody)
    operator.stage.submit("llama-3.1-8b", 3, 4000, client="unwanted")
    operator.open("/")

    operator.press("Empty")

    assert "requests that wait" in operator.confirmed
    assert operator.plant.result("unwanted-0002", "unwanted").status == "cancelled"
    operator.open("/signals")
    operator.press("Unpause", within=everybody)


def test_cancel_and_resume_a_batch(operator: Operator) -> None:
    operator.stage.submit_batch("held", 5, "mistral-7b")  # without a worker of batches: it waits
    operator.open("/batches")
    operator.page.get_by_role("link", name="batch_").first.click()

    operator.press("Cancel")
    operator.window.wait_for_text("cancelled")
    operator.press("Resume")
    assert "waits for a worker again" in operator.window.text()
