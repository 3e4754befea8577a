"""A bridge between a front end of vLLM and real workers: every answer ends, and ends right."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builders import make_request
from tests.support.front_end import ERROR, LENGTH, STOP, FrontEnd
from tests.support.processes import Plant, Program
from tests.support.servers import Server
from tests.support.streams import expected
from tests.support.waiting import eventually
from tokenyard.protocol.tenants import TenantSettings, encode_tenant
from tokenyard.protocol.wire import Request, SamplingParams, pack_tokens

pytestmark = [pytest.mark.crash, pytest.mark.timeout(180)]

#: Slow enough that a test meets it halfway.
STEP_S = 0.02
LONG = 150


@pytest.fixture
def plant(broker: Server) -> Iterator[Plant]:
    with Plant(broker.url) as started:
        yield started


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with FrontEnd() as started:
        yield started


def bridge(plant: Plant, front: FrontEnd, folder: Path, **options: object) -> Program:
    """Start a bridge for a front end."""
    known = {"handshake": front.address, "journal_dir": folder, "grace_s": 0.5}
    return plant._start("gateway.bridge", known | options)


def made(prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens that an undisturbed engine makes."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False)
    return expected(make_request(tokens=prompt, params=params))


def test_answers_come_back_with_their_tokens(plant: Plant, front: FrontEnd, tmp_path: Path) -> None:
    plant.up(slots=2)
    bridge(plant, front, tmp_path)
    front.meet()
    assert front.ready[0]["max_model_len"] > 0
    for number in range(20):
        whole = {"output_kind": 2} if number % 2 else {}
        front.ask(f"cmpl-{number}-0-abcd", [number, 7], max_tokens=30, **whole)
    for number in range(20):
        answer = front.wait(f"cmpl-{number}-0-abcd")
        assert answer.tokens == made([number, 7], 30)
        assert answer.finish in {LENGTH, STOP}
        prefill = answer.outputs[0][11]
        assert (prefill["num_prompt_tokens"], prefill["num_cached_tokens"]) == (2, 0)
        if number % 2:
            assert len(answer.outputs) == 1, "a whole answer comes as one message"


def test_numbers_come_back(plant: Plant, front: FrontEnd, tmp_path: Path) -> None:
    plant.up()
    bridge(plant, front, tmp_path, vllm_version="0.33.0")
    front.meet()
    pair = {"compressed_token_type_ids": 2}
    front.pool("embd-one", [5, 6], *[None] * 4, "embed")
    front.pool("pair", [5, 6, 7], *[None] * 4, "classify", False, None, None, pair)
    front.pool("kept", [5], *[None] * 4, "token_embed", False, None, {"mode": "cache_query"})
    direct = [
        Request(id="0", task="embed", tokens=pack_tokens([5, 6])),
        Request(id="1", task="classify", inputs=[[[5, 6], [7]]]),
    ]
    plant.push_all(direct)
    for name, length, result in zip(
        ("embd-one", "pair"), (2, 3), plant.results(direct), strict=True
    ):
        answer = front.wait(name)
        kind, shape, numbers = answer.outputs[-1][4]
        assert (answer.finish, kind) == (STOP, "float32")
        assert ([shape], numbers.data) == (result.shapes, result.data)
        assert answer.outputs[-1][11]["num_prompt_tokens"] == length
    assert "late_interaction_params" in front.wait("kept").outputs[-1][18]["message"]


def test_what_the_wire_cannot_carry_ends_with_an_error(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    plant.up()
    program = bridge(plant, front, tmp_path, vllm_version="0.33.0")
    front.meet()
    front.ask("one", [5], routed_experts_prompt_start=3)
    front.ask("two", [5], temperature=-1.0)
    front.send(b"\x00", b"\xc1 is no msgpack")
    front.send(b"\x03", b"\x94\x00\x07\xa5sleep\x90")
    front.ask("four", [2**40])
    front.ask("three", [5])
    for name, why in (("one", "routed_experts_prompt_start"), ("two", "temperature")):
        answer = front.wait(name)
        assert answer.finish == ERROR
        error = answer.outputs[-1][18]
        assert error["code"] == "validation_error"
        assert why in error["message"]
    assert front.wait("four").finish == ERROR
    assert front.wait("three").finish in {LENGTH, STOP}
    assert front.told[7][1] == "sleep: the queue has no such call"
    assert "cannot be read" in program.log


def test_an_aborted_request_is_cancelled_but_not_one_with_a_name(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    plant.up(simulated_step_s=STEP_S)
    bridge(plant, front, tmp_path)
    front.meet()
    front.ask("cmpl-x-0-aa", [5], max_tokens=LONG)
    front.ask("cmpl-idem-k-0-bb", [6], name="cmpl-idem-k-0", max_tokens=LONG)
    front.wait_for_tokens("cmpl-x-0-aa")
    front.wait_for_tokens("cmpl-idem-k-0-bb")
    front.abort("cmpl-x-0-aa", "cmpl-idem-k-0-bb", "cmpl-unknown")
    assert plant.result("cmpl-x-0-aa", "http").status == "cancelled"
    assert plant.result("cmpl-idem-k-0", "http").tokens == made([6], LONG)


def test_a_name_that_is_asked_again_is_not_generated_again_and_has_the_same_pieces(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    plant.up(simulated_step_s=STEP_S, stream_interval_ms=100)
    bridge(plant, front, tmp_path)
    front.meet()
    params = {"name": "cmpl-idem-k-0", "max_tokens": 60}
    front.ask("cmpl-idem-k-0-aa", [6], **params)
    seen = front.wait_for_tokens("cmpl-idem-k-0-aa", 10).tokens
    front.ask("cmpl-idem-k-0-bb", [6], **params)
    first, second = (front.wait(f"cmpl-idem-k-0-{end}") for end in ("aa", "bb"))
    front.ask("cmpl-idem-k-0-cc", [6], **params)
    third = front.wait("cmpl-idem-k-0-cc")
    assert first.pieces == second.pieces == third.pieces
    assert first.tokens == made([6], 60)
    assert first.tokens[: len(seen)] == seen
    assert plant.ledger("cmpl-idem-k-0", "http")["attempt"] == "1"
    front.ask("cmpl-idem-k-0-dd", [7], **params)
    assert front.wait("cmpl-idem-k-0-dd").finish == ERROR, "another request under this name"


def test_streams_survive_their_workers(plant: Plant, front: FrontEnd, tmp_path: Path) -> None:
    controller = plant.up(slots=2, simulated_step_s=STEP_S)
    bridge(plant, front, tmp_path)
    front.meet()
    names = [f"cmpl-{number}-0-abcd" for number in range(12)]
    for number, name in enumerate(names):
        front.ask(name, [number + 1], max_tokens=LONG)
    for name in names:
        front.wait_for_tokens(name, 5)
    for worker in controller.children()[:2]:
        worker.kill()
    for number, name in enumerate(names):
        assert front.wait(name).tokens == made([number + 1], LONG)


def test_streams_survive_the_coordinator_and_requests_wait_for_the_next(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    leader = plant.coordinator()
    plant.worker(simulated_step_s=STEP_S)
    plant.wait_for_workers(1)
    bridge(plant, front, tmp_path)
    front.meet()
    front.ask("cmpl-1-0-aa", [5], max_tokens=LONG)
    front.wait_for_tokens("cmpl-1-0-aa", 5)
    leader.kill()
    front.ask("cmpl-2-0-aa", [6], max_tokens=5)
    assert front.wait("cmpl-1-0-aa").tokens == made([5], LONG)
    plant.end_lead()
    plant.coordinator()
    assert front.wait("cmpl-2-0-aa").tokens == made([6], 5)


def test_streams_survive_the_broker(own_broker: Server, front: FrontEnd, tmp_path: Path) -> None:
    names = [f"cmpl-{number}-0-aa" for number in range(8)]
    with Plant(own_broker.url) as plant:
        plant.up(simulated_step_s=STEP_S)
        program = bridge(plant, front, tmp_path)
        front.meet()
        for number, name in enumerate(names):
            front.ask(name, [number + 1], max_tokens=LONG)
        for name in names:
            front.wait_for_tokens(name, 5)
        own_broker.kill()
        front.ask("meanwhile", [5])
        assert front.wait("meanwhile").finish == ERROR
        own_broker.start()
        for number, name in enumerate(names):
            assert front.wait(name).tokens == made([number + 1], LONG)
        front.ask("cmpl-next-0-aa", [7], max_tokens=5)
        assert front.wait("cmpl-next-0-aa").tokens == made([7], 5)
        assert program.is_running


def test_a_bridge_that_is_killed_is_followed_by_one_that_ends_what_waits(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    plant.up(simulated_step_s=STEP_S)
    first = bridge(plant, front, tmp_path)
    front.meet()
    front.ask("done", [4], max_tokens=2)
    front.wait("done")
    front.ask("cmpl-\n-0-aa", [5], max_tokens=LONG)
    front.ask("cmpl-idem-k-0-bb", [6], name="cmpl-idem-k-0", max_tokens=LONG)
    seen = front.wait_for_tokens("cmpl-idem-k-0-bb", 5).tokens
    first.kill()
    second = bridge(plant, front, tmp_path)
    front.wait_for_engine()
    for name in ("cmpl-\n-0-aa", "cmpl-idem-k-0-bb"):
        assert front.wait(name).finish == ERROR
    front.ask("cmpl-idem-k-0-cc", [6], name="cmpl-idem-k-0", max_tokens=LONG)
    again = front.wait("cmpl-idem-k-0-cc").tokens
    assert again == made([6], LONG)
    assert again[: len(seen)] == seen
    assert plant.ledger("cmpl-idem-k-0", "http")["attempt"] == "1"
    assert second.stop() == 0


def test_a_bridge_leaves_in_order(plant: Plant, front: FrontEnd, tmp_path: Path) -> None:
    plant.up(simulated_step_s=STEP_S)
    first = bridge(plant, front, tmp_path, grace_s=60)
    front.meet()
    front.ask("short", [5], max_tokens=30)
    front.wait_for_tokens("short")
    first.signal(signal.SIGTERM)
    eventually(lambda: "stopping" in first.log)
    front.ask("late", [5])
    assert front.wait("late").finish == ERROR
    assert front.wait("short").tokens == made([5], 30)
    assert first.wait() == 0
    bridge(plant, front, tmp_path)
    front.wait_for_engine()
    front.ask("next", [5], max_tokens=3)
    assert front.wait("next").tokens == made([5], 3)


def test_a_front_end_that_is_killed_is_met_again_and_what_it_waited_for_is_cancelled(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    plant.up(simulated_step_s=STEP_S)
    bridge(plant, front, tmp_path)
    front.meet()
    front.ask("cmpl-x-0-aa", [5], max_tokens=LONG)
    front.ask("cmpl-idem-k-0-bb", [6], name="cmpl-idem-k-0", max_tokens=LONG)
    seen = front.wait_for_tokens("cmpl-idem-k-0-bb", 5).tokens
    front.wait_for_tokens("cmpl-x-0-aa")
    port = front.port
    front.close()
    assert plant.result("cmpl-x-0-aa", "http").status == "cancelled"
    with FrontEnd(port) as next_one:
        next_one.meet()
        next_one.ask("cmpl-idem-k-0-cc", [6], name="cmpl-idem-k-0", max_tokens=LONG)
        again = next_one.wait("cmpl-idem-k-0-cc").tokens
    assert again == made([6], LONG)
    assert again[: len(seen)] == seen
    assert plant.ledger("cmpl-idem-k-0", "http")["attempt"] == "1"


def test_two_bridges_serve_two_front_ends_with_the_same_answers(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    plant.up(simulated_step_s=STEP_S)
    with FrontEnd() as other:
        bridge(plant, front, tmp_path)
        bridge(plant, other, tmp_path)
        front.meet()
        other.meet()
        front.ask("cmpl-idem-k-0-aa", [6], name="cmpl-idem-k-0", max_tokens=60)
        front.wait_for_tokens("cmpl-idem-k-0-aa", 5)
        other.ask("cmpl-idem-k-0-bb", [6], name="cmpl-idem-k-0", max_tokens=60)
        assert front.wait("cmpl-idem-k-0-aa").pieces == other.wait("cmpl-idem-k-0-bb").pieces
    assert plant.ledger("cmpl-idem-k-0", "http")["attempt"] == "1"


def test_a_front_end_has_one_bridge_at_a_time(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    plant.up()
    bridge(plant, front, tmp_path)
    front.meet()
    second = bridge(plant, front, tmp_path)
    assert second.wait() == 2
    assert "another bridge has this front end" in second.log


def test_the_tenant_and_the_deadline_come_with_the_id(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    plant.up(simulated_step_s=STEP_S)
    bridge(plant, front, tmp_path)
    front.meet()
    front.ask("cmpl-~acme~high~0~~idem-k-0-aa", [6], name="cmpl-~acme~high~0~~idem-k-0")
    assert front.wait("cmpl-~acme~high~0~~idem-k-0-aa").tokens == made([6], 16)
    assert plant.result("cmpl-idem-k-0~acme", "http.acme").ok
    front.ask("cmpl-~~normal~~1000~x-0-aa", [6])
    assert front.wait("cmpl-~~normal~~1000~x-0-aa").finish == ERROR


def test_a_stream_comes_at_the_interval_of_its_tenant(
    plant: Plant, front: FrontEnd, tmp_path: Path
) -> None:
    settings = encode_tenant(TenantSettings(stream_interval_ms=10_000))
    plant.connection.hset(plant.keys.tenants, "seldom", settings)
    plant.up(simulated_step_s=STEP_S)
    bridge(plant, front, tmp_path)
    front.meet()
    asked = ("~seldom~normal~~~a", "~other~normal~~~b", "~seldom~normal~0~~c")
    for name in asked:
        front.ask(f"cmpl-{name}-0-aa", [6], name=f"cmpl-{name}-0", max_tokens=LONG)
    seldom, other, own = (len(front.wait(f"cmpl-{name}-0-aa").pieces) for name in asked)
    assert seldom < 5 < other
    assert own > 5, "the interval that a request names comes first"
