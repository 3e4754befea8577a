"""What browsers send for pages of other sites, and what programs send."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from tokenyard.process.http_guard import (
    FOREIGN_HOST,
    FOREIGN_PAGE,
    NO_HOST,
    GuardRefusal,
    SiteGuard,
)

LOCAL = SiteGuard(["127.0.0.5", "https://api.example.com"])
KEYED = SiteGuard(None)
LISTED = SiteGuard([], ["https://app.example.com", "chrome-extension://abc"])
HOST = "localhost:8000"


def refusal(
    guard: SiteGuard, method: str = "POST", *, is_tls: bool = False, **given: str
) -> GuardRefusal | None:
    headers = {name.replace("_", "-"): value for name, value in given.items()}
    return guard.refusal(method, Headers(headers), is_tls=is_tls)


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:1", "[::1]:80", "127.0.0.5", "API.example.com"]
)
def test_a_program_sends_no_origin_and_calls_the_server_by_its_names(host: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert refusal(LOCAL, method, host=host) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.6", "10.0.0.1"]
)
def test_another_name_is_refused_on_a_machine_where_no_key_is_asked_for(host: str) -> None:
    for method in ("GET", "HEAD", "POST", "OPTIONS"):
        own_page = {"origin": f"http://{host}", "sec_fetch_site": "same-origin"}
        assert refusal(LOCAL, method, host=host) is FOREIGN_HOST
        assert refusal(LOCAL, method, host=host, **own_page) is FOREIGN_HOST
    assert refusal(LOCAL) is NO_HOST


@pytest.mark.parametrize("host", ["10.2.3.4:8000", "gateway.llm.svc.cluster.local.", "a b", ""])
def test_with_keys_any_name_will_do(host: str) -> None:
    assert refusal(KEYED, "GET", host=host) is None
    assert refusal(KEYED, "GET") is None  # a probe by HTTP/1.0


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "",
        "http://evil.example",
        "http://localhost:3000",
        "https://localhost:8000.evil",
        "*",
    ],
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    for guard in (LOCAL, KEYED, LISTED):
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            assert refusal(guard, method, host=HOST, origin=origin) is FOREIGN_PAGE


def test_a_page_of_the_server_itself_is_known_by_its_origin() -> None:
    assert refusal(LOCAL, host=HOST, origin=f"http://{HOST}") is None
    assert refusal(LOCAL, host=HOST, origin=f"http://{HOST}", is_tls=True) is FOREIGN_PAGE
    assert refusal(KEYED, host="api.example", origin="https://api.example", is_tls=True) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_page_embeds_or_sends_without_an_origin_is_refused(site: str) -> None:
    embedded = {"sec_fetch_site": site, "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"}
    link = {"sec_fetch_site": site, "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert refusal(LOCAL, "GET", host=HOST, **embedded) is FOREIGN_PAGE
    assert refusal(LOCAL, "GET", host=HOST, **link) is None
    assert refusal(LOCAL, "POST", host=HOST, **link) is FOREIGN_PAGE


@pytest.mark.parametrize("origin", ["https://app.example.com", "chrome-extension://abc"])
def test_a_page_of_a_listed_origin_may_send(origin: str) -> None:
    sent = {"host": HOST, "origin": origin, "sec_fetch_site": "cross-site"}
    assert refusal(LISTED, **sent) is None
    assert refusal(SiteGuard(None, ["*"]), **sent) is None
    assert refusal(LISTED, **sent | {"host": "evil.example"}) is FOREIGN_HOST
    assert refusal(LISTED, **sent | {"origin": f"{origin}:8"}) is FOREIGN_PAGE
