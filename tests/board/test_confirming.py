"""A form that is refused comes again, with what was typed and what is wrong beside its field."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping

import pytest

from tests.board.looking import Looker, text_of, values_of
from tests.support.yard import PlayedYard
from tokenyard.board.operations import ASKED, OPERATIONS, Input, as_first_asked, ask_again
from tokenyard.board.page import Actor, Parameters
from tokenyard.ops.operation import Preview
from tokenyard.protocol.errors import Refused

pytestmark = pytest.mark.valkey_only

EVIL = '"><script>alert(1)</script>'
WHY = "the night shift"
BACK = "/board/yard?x=1"
Values = Mapping[str, str]


@pytest.fixture
def yard(yard: PlayedYard) -> PlayedYard:
    yard.worker("w")
    return yard


@pytest.fixture
def looker(looker: Looker, yard: PlayedYard) -> Looker:
    looker.actor = Actor("olga", "admin")
    return looker


def sent(looker: Looker, action: str, given: Values, typed: Values) -> dict[str, str]:
    """What a browser sends of the form that it was shown, once these fields are filled in."""
    return fields_of(looker.ask(action, {**given, "back": BACK})) | {"why": WHY, **typed}


def fields_of(page: str) -> dict[str, str]:
    """The fields of the form on a page, with their values."""
    form = page[page.index('method="post"') :]
    names = [html.unescape(name) for name in re.findall(r'<input [^>]*?name="([^"]*)"', form)]
    found = {name: values_of(form, name)[0] for name in names if values_of(form, name)}
    for name, options in re.findall(
        r'<select [^>]*?name="([^"]*)".*?>(.*?)</select>', form, re.DOTALL
    ):
        found[name] = "".join(re.findall(r"<option selected>([^<]*)", options))
    return found


@pytest.mark.parametrize(
    ("action", "given", "typed", "wrong", "said"),
    [
        ("tenant.set", {"tenant": "lab"}, {"weight": "a", "max_tokens": "7"}, "weight", "'a'"),
        ("tenant.set", {"tenant": "lab"}, {"models": "a", "weight": "-1"}, "weight", "from 0.001"),
        ("tenant.set", {}, {"tenant": "two words", "weight": "3"}, "tenant", "'two words'"),
        ("tenant.set", {}, {"tenant": "two\u202e", "weight": "3"}, "tenant", "'two\\u202e'"),
        ("tenant.set", {"tenant": "lab"}, {"max_tokens": "9" * 5_000}, "max_tokens", "a whole"),
        ("tenant.set", {"tenant": "lab"}, {"classes": "fast"}, "classes", "use high, normal, low"),
        ("key.create", {}, {"tenant": EVIL}, "tenant", "A-Z a-z 0-9"),
        ("key.create", {"tenant": "lab"}, {"role": "king"}, "role", "give one of"),
        ("key.create", {}, {"name": "n"}, "tenant", "a role, or both"),
        ("key.create", {}, {"tenant": "lab", "name": "n" * 201}, "name", "200 characters"),
        ("model.load", {"model": "adder"}, {"worker": "nobody"}, "worker", "'nobody'"),
        ("model.sleep", {"model": "adder"}, {"level": "9", "worker": "w"}, "level", "from 1 to 2"),
        (
            "model.reload",
            {"model": "adder"},
            {"path": "weights", "epoch": "7", "timeout": "9"},
            "path",
            "give an absolute path",
        ),
        ("model.reload", {"model": "adder"}, {"timeout": "0", "epoch": "7"}, "timeout", "from 1"),
        ("signal.pause", {"scope": "all"}, {"mode": "softly"}, "mode", "give one of abort"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_beside_its_field_and_nothing_is_done_or_lost(
    looker: Looker,
    yard: PlayedYard,
    action: str,
    given: Values,
    typed: Values,
    wrong: str,
    said: str,
) -> None:
    form = sent(looker, action, given, typed)

    answer = looker.post(action, form)

    assert answer.status_code == 400
    page = answer.text
    assert "<script>alert" not in page
    assert not yard.connection.exists(yard.keys.tenants, yard.keys.api_keys)
    selects = {"mode", "level", "role"}
    shown = fields_of(page)
    assert {n: v for n, v in shown.items() if n not in selects} == {
        n: v for n, v in form.items() if n not in selects
    }
    assert shown["why"] == WHY
    assert f'href="{BACK}"' in page
    # The error stands beside the field, which has the focus.
    assert page.count('aria-invalid="true"') == 1
    field = re.search(r'<[^>]*aria-invalid="true" autofocus[^>]*>', page)
    assert field is not None
    assert f'name="{wrong}"' in field[0]
    assert f'aria-describedby="error_{wrong}' in field[0]
    error = re.search(rf'<p class="told bad" id="error_{wrong}" role="alert">([^<]*)</p>', page)
    assert error is not None
    assert said in text_of(error[1])


def test_an_action_that_cannot_be_done_leads_back(looker: Looker) -> None:
    asked = looker.get("/do/request.cancel", 400, {"back": "/board/requests?state=failed"})
    assert '<a href="/board/requests?state=failed">Back</a>' in asked
    done = looker.post("tenant.remove", {"back": BACK}).text
    assert f'<a href="{BACK}">Back</a>' in done
    elsewhere = looker.get("/do/request.cancel", 400, {"back": "https://evil.example/"})
    assert "evil" not in elsewhere


def test_a_corrected_form_is_taken(looker: Looker) -> None:
    form = sent(looker, "tenant.set", {}, {"tenant": "a b", "weight": "3", "max_tokens": "70"})
    again = fields_of(looker.post("tenant.set", form).text)

    form = again | {"tenant": "lab", "weight": "many"}
    again = fields_of(looker.post("tenant.set", form).text)
    assert again["tenant"] == "lab"
    done = looker.do("tenant.set", again | {"weight": "4"})

    assert (done.why, done.error) == (WHY, "")
    assert "weight 4" in done.text
    assert "70" in done.text


def test_a_checkbox_stays_as_it_was_set() -> None:
    inputs = [Input("one", "One", kind="checkbox"), Input("two", "Two", "on", kind="checkbox")]
    form = (Preview("Do it."), inputs)
    op = OPERATIONS["batch.resume"]
    sent = Parameters({ASKED: ["one,two"], "one": ["on"]}, Actor("olga", "admin"))
    first = as_first_asked(sent)
    assert first is not None

    again = ask_again(op, form, first, sent, Refused("Not today."))

    assert [one.value for one in again["inputs"]] == ["on", ""]


def test_a_form_that_somebody_has_overtaken_keeps_what_was_typed(looker: Looker) -> None:
    form = sent(looker, "tenant.set", {"tenant": "lab"}, {"weight": "3"})
    looker.do("tenant.set", {"tenant": "lab", "weight": "9"})

    first = looker.post("tenant.set", form)

    # What concerns no field stands above the form.
    said = first.text.index("somebody else has changed lab meanwhile")
    assert said < first.text.index('method="post"')
    assert fields_of(first.text)["weight"] == "3"
    # Sent again as it is, it still does not overwrite the change of the other.
    assert looker.post("tenant.set", fields_of(first.text)).status_code == 400
    assert "weight 9" in looker.audit()[-1].text


@pytest.mark.parametrize("asked", ["", "scope", "scope,mode", EVIL])
def test_a_form_of_another_page_gets_the_error_alone(looker: Looker, asked: str) -> None:
    """Where the page cannot be asked again, the error is what there is to say."""
    form = {"scope": "model:nobody", "mode": "abort", ASKED: asked}

    answer = looker.post("signal.pause", form)

    assert answer.status_code == 400
    assert "there is no model" in answer.text
    assert 'method="post"' not in answer.text.partition("<main")[2]


def test_nothing_is_asked_again_where_nothing_is_left_to_do(
    looker: Looker, yard: PlayedYard
) -> None:
    key = looker.post("key.create", {"tenant": "lab"}).text
    assert key
    [made] = looker.audit()
    page = looker.ask("key.revoke", {"key": made.target.split()[1]})
    assert looker.post("key.revoke", fields_of(page)).status_code == 303

    answer = looker.post("key.revoke", fields_of(page))

    assert answer.status_code == 400
    assert "there is no such key any more" in answer.text
    assert 'name="key"' not in answer.text
