"""An id reused for another request: both clients raise an error, and the first is unaffected."""

from __future__ import annotations

import pytest

from tests.contract.conftest import WAIT_S, NewClient
from tests.contract.stand_in import StandIn
from tests.contract.test_submitting import Letters
from tokenyard import IdReused


@pytest.mark.parametrize("same_client", [True, False])
def test_another_request_of_a_known_id_is_refused(
    yard: StandIn, new_client: NewClient, same_client: bool
) -> None:
    first = new_client(client_id="me")
    handle = first.submit([1], id="q")
    again = first if same_client else new_client(client_id="me")

    for is_over in (False, True):
        if is_over:
            yard.answer_all()
            assert handle.result(WAIT_S).tokens == [2]
        with pytest.raises(IdReused, match="ID_REUSED: the id 'q' is known with another") as caught:
            again.submit([1], id="q", temperature=1.0)
        assert (caught.value.request_id, caught.value.accepted) == ("q", [])

    assert again.attach("q").result(WAIT_S).tokens == [2]
    assert len(yard.seen) == 1


def test_fields_that_do_not_change_the_answer_may_differ(
    yard: StandIn, new_client: NewClient
) -> None:
    handle = new_client(client_id="me").submit([1], id="q", max_tokens=3)
    yard.answer_all()

    again = new_client(client_id="me").submit(
        (1,),
        id="q",
        params={"max_tokens": 3},
        stream=True,
        priority=2,
        deadline_s=60,
        result_ttl_s=60,
        metadata={"try": 2},
        tenant="t",
        session="s",
        priority_class="high",
    )

    assert again.result(WAIT_S) == handle.result(WAIT_S)


def test_text_is_the_same_request_with_and_without_a_tokenizer(
    yard: StandIn, new_client: NewClient
) -> None:
    handle = new_client(client_id="me").submit("HAL", id="q")
    yard.answer_all()

    again = new_client(client_id="me", tokenizer=Letters()).submit("HAL", id="q")

    assert again.result(WAIT_S).tokens == handle.result(WAIT_S).tokens


def test_an_attached_request_is_distinguished_from_another(
    yard: StandIn, new_client: NewClient
) -> None:
    new_client(client_id="me").submit([1], id="q")
    client = new_client(client_id="me")
    attached = client.attach("q")

    with pytest.raises(IdReused):
        client.submit([2], id="q")
    same = client.submit([1], id="q")

    yard.answer_all()
    assert attached.result(WAIT_S) == same.result(WAIT_S)


def test_the_rest_of_a_burst_is_accepted(yard: StandIn, new_client: NewClient) -> None:
    new_client(client_id="me").submit([1], id="old")
    items = [{"prompt": [5], "id": "a"}, {"prompt": [6], "id": "old"}, {"prompt": [7], "id": "b"}]
    items += [{"prompt": [8], "id": "b"}]

    with pytest.raises(IdReused) as caught:
        new_client(client_id="me").submit_many(items)

    yard.answer_all()
    assert [each.result(WAIT_S).tokens for each in caught.value.accepted] == [[6], [8]]


def test_map_returns_the_reuse_as_that_items_result(yard: StandIn, new_client: NewClient) -> None:
    new_client(client_id="me").submit([1], id="old")
    items = [{"prompt": [5], "id": "a"}, {"prompt": [6], "id": "old"}]

    with yard.running():
        results = dict(new_client(client_id="me").map(items))

    assert results[0].tokens == [6]
    assert (results[1].status, results[1].error.code) == ("failed", "ID_REUSED")
