"""Requests made from the gateway's own OpenAPI document, right ones and wrong ones.

Never a 500, never a hang, never an accepted request without an end, and no answer that the document
does not describe. What they cost others is seen in `test_bad_input`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, Response
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.gateway.bad_input import CORES
from tests.gateway.ends import all_ends
from tests.gateway.stand import Door, Stand
from tests.support.effort import examples

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(1800)]

_DOCUMENTS: Final = {"model": "cross", "query": "abc", "documents": ["a", "b"]}
_PAIRS: Final = {"model": "cross", "text_1": "abc", "text_2": ["a", "b"]}
#: What makes a body acceptable, by path, with the model.
POOLING: Final[dict[str, dict[str, Any]]] = {
    "/v1/embeddings": {"model": "bert", "input": "abc"},
    "/v2/embed": {"model": "bert", "texts": ["abc"], "input_type": "search_query"},
    "/pooling": {"model": "bert", "input": "abc"},
    "/classify": {"model": "cross", "input": "abc"},
    **dict.fromkeys(("/score", "/v1/score"), _PAIRS),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _DOCUMENTS),
}
ALL_CORES: Final = {path: {"model": "speaker", **core} for path, core in CORES.items()} | POOLING
#: No answer may take longer: the longest has 1,000 tokens.
LONGEST_S: Final = 60.0
#: Most tokens of most answers.
FEW: Final = 5
#: The requests for each operation of the document; ten times as many in a deep search.
SHARES: Final[dict[str, int]] = {
    "POST /v1/chat/completions": 60,
    "POST /v1/completions": 40,
    "POST /v1/responses": 50,
    "POST /v1/messages": 50,
    **{f"POST {path}": 10 for path in POOLING},
    "POST /v1/audio/transcriptions": 10,
    "POST /v1/audio/translations": 10,
    "POST /v1/messages/count_tokens": 15,
    "POST /tokenize": 15,
    "POST /detokenize": 10,
    "GET /v1/responses/{response_id}": 10,
    "DELETE /v1/responses/{response_id}": 5,
    "POST /v1/responses/{response_id}/cancel": 5,
    "GET /v1/responses/{response_id}/input_items": 5,
    "POST /v1/files": 10,
    "GET /v1/files": 5,
    "GET /v1/files/{file_id}": 5,
    "DELETE /v1/files/{file_id}": 5,
    "GET /v1/files/{file_id}/content": 5,
    "POST /v1/batches": 10,
    "GET /v1/batches": 5,
    "GET /v1/batches/{batch_id}": 5,
    "POST /v1/batches/{batch_id}/cancel": 5,
    "GET /v1/models": 2,
    "GET /v1/models/{model}": 5,
    "GET /health": 1,
    "GET /livez": 1,
    "GET /version": 1,
    "GET /metrics": 1,
    "GET /openapi.json": 1,
}
REFUSALS: Final = {400, 404, 409, 413, 422, 501}
#: Of requests with a deadline.
LATE: Final = {503, 504}
#: What the last event of a stream has.
ENDS: Final = {
    "/v1/responses": ("response.completed", "response.failed", "response.incomplete", "error"),
    "/v1/messages": ("message_stop", "error"),
}


GENERATING: Final = {*("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")}
#: Most fields and headers beside those.
MOST_MORE: Final = 4


@dataclass(frozen=True)
class Known:
    """What exists."""

    ids: dict[str, str]
    file: str


@pytest.fixture(scope="module")
def schema(stand: Stand) -> Any:
    """The document, as schemathesis reads it."""
    return schemathesis.openapi.from_dict(
        httpx.get(f"{stand.door(0).url}/openapi.json", timeout=60.0).json()
    )


@pytest.fixture
def known(http: httpx.Client) -> Iterator[Known]:
    """A file, a batch over another one, and a response."""
    files = [
        http.post(
            "/v1/files", files={"file": ("in.jsonl", b"{}\n")}, data={"purpose": "batch"}
        ).json()["id"]
        for _ in range(2)
    ]
    asked = {"input_file_id": files[1], "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = http.post("/v1/batches", json=asked).json()["id"]
    body = {"model": "speaker", "input": "a", "background": True, "max_output_tokens": 9}
    response = http.post("/v1/responses", json=body).json()["id"]
    ids = {"file_id": files[0], "batch_id": batch, "response_id": response, "model": "speaker"}
    yield Known(ids, files[1])
    for one in http.get("/v1/batches", params={"limit": 100}).json()["data"]:
        assert http.post(f"/v1/batches/{one['id']}/cancel").status_code == 200


@st.composite
def cases(draw: st.DrawFn, operation: Any, known: Known) -> Case:
    """A request by the document or, one in three, against it.

    Most of them are made acceptable but for some fields: of a body with all fields that the
    document allows, one is always wrong.
    """
    positive, negative = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
    mode = draw(st.sampled_from([positive, positive, negative]))
    case: Case = draw(operation.as_strategy(mode))
    if draw(st.integers(0, 9)) == 9:
        return case
    for name in case.path_parameters or {}:
        case.path_parameters[name] = known.ids[name]
    for name in set(case.headers or ()) - draw(some(case.headers or ())):
        del case.headers[name]
    if isinstance(case.body, dict) and case.path in ALL_CORES:
        kept = draw(some(case.body))
        case.body = {name: case.body[name] for name in case.body if name in kept}
        core = ALL_CORES[case.path]
        case.body["model"] = core["model"]
        if draw(st.integers(0, 4)) < 4:
            case.body |= core
        if case.path in GENERATING and draw(st.booleans()):
            case.body["stream"] = True
        _shorten(case.body, case.path)
    elif isinstance(case.body, dict) and "input_file_id" in case.body:
        case.body["input_file_id"] = known.file
    return case


def some(names: Iterable[str]) -> st.SearchStrategy[set[str]]:
    """Some of the names."""
    return st.sets(st.sampled_from(sorted(names)), max_size=MOST_MORE) if names else st.just(set())


def _shorten(body: dict[str, Any], path: str) -> None:
    """Ask for few tokens, unless the number is wrong anyway."""
    if path not in GENERATING:
        return
    usual = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    for name in {usual, "max_tokens", "max_completion_tokens"} & {usual, *body}:
        given = body.get(name)
        if given is None or (isinstance(given, int) and given > FEW):
            body[name] = FEW


def check(case: Case, answer: Response) -> None:
    """An answer that the document describes, to its end."""
    status, text = answer.status_code, answer.content.decode(errors="replace")
    is_late = status in LATE and _may_be_late(case)
    assert status == 200 or status in REFUSALS or is_late, (status, text[:2000])
    kind = answer.headers["content-type"][0]
    if kind.startswith("text/event-stream"):
        check_stream(case.path, text)
        return
    if status != 200:
        assert json.loads(text)["error"]["message"]
    case.validate_response(answer, checks=[content_type_conformance, response_schema_conformance])


def _may_be_late(case: Case) -> bool:
    """Whether it has a deadline, or the key of an earlier request that may have had one."""
    headers = {name.lower() for name in case.headers or {}}
    has_field = isinstance(case.body, dict) and "timeout" in case.body
    return has_field or not headers.isdisjoint({"x-request-timeout-ms", "idempotency-key"})


def check_stream(path: str, text: str) -> None:
    """A stream that has its end, and no internal error."""
    compact = text.replace(" ", "")
    assert '"code":500' not in compact, text[-2000:]
    if not text:  # all events are known to the client
        return
    last = text.rstrip().rpartition("\n\n")[2]
    ends = next((ends for start, ends in ENDS.items() if path.startswith(start)), ("[DONE]",))
    assert any(end in last for end in ends), text[-2000:]


def test_every_operation_is_searched(schema: Any) -> None:
    found = {operation.ok().label for operation in schema.get_all_operations()}

    assert found == set(SHARES)


@pytest.mark.parametrize("name", SHARES)
def test_no_request_breaks_the_gateway(
    stand: Stand, door: Door, schema: Any, known: Known, name: str
) -> None:
    method, _, path = name.partition(" ")
    session = requests.Session()
    session.trust_env = False

    @settings(
        max_examples=examples(SHARES[name], 10 * SHARES[name]),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(schema[path][method], known))
    def search(case: Case) -> None:
        check(case, case.call(base_url=door.url, session=session, timeout=LONGEST_S))

    with all_ends(stand, door):
        search()
