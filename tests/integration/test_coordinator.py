"""One coordinator or two: the lead, bad input, broken groups and connections, start and stop."""

from __future__ import annotations

import logging
import threading

import pytest

from coordinator import leadership
from coordinator.coordinator import Coordinator
from tests.support.builders import make_request
from tests.support.lanes import LONG_MS, STOP_S, Lanes, requests, running
from tests.support.processes import Plant
from tests.support.servers import Server, free_port
from tests.support.waiting import eventually
from tokenyard import Client
from tokenyard.protocol.keys import INTAKE_CLASSES
from tokenyard.protocol.replies import to_result
from tokenyard.protocol.settings import CoordinatorSettings
from tokenyard.protocol.wire import SamplingParams
from tokenyard.scripts.calls import digest, script_names


def served(lanes: Lanes, worker: str, count: int = 3) -> bool:
    """Whether new requests come onto the lane."""
    ids = lanes.push([make_request() for _ in range(count)])
    eventually(lambda: set(ids) <= set(lanes.ids(worker)))
    return True


class TestLead:
    @pytest.mark.long
    def test_a_standby_takes_over_immediately_from_a_leader_that_stops(self, lanes: Lanes) -> None:
        # Given a leader with queued requests, and a standby
        worker = lanes.worker(lane_limit=2)
        with running(Coordinator(lanes.settings(name="one", lease_ms=LONG_MS))):
            lanes.push(requests(10))
            lanes.wait_for_load(worker, 2)
            lanes.coordinator(name="two", lease_ms=20_000)

        # If the leader stops, which the end of the block has waited for,
        # I expect the standby to lead long before the lease would have ended, and to continue.
        eventually(lambda: lanes.connection.get(lanes.keys.leader) == b"2:two")
        assert lanes.serve([worker], 10) == [f"r{at:04}" for at in range(10)]

    def test_a_former_leader_moves_nothing_and_recovers(
        self, lanes: Lanes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given a leader whose lead another takes
        monkeypatch.setattr(leadership, "ANNOUNCE_S", 0.05)
        caplog.set_level(logging.INFO, "tokenyard.coordinator.leadership")
        worker = lanes.worker()
        lanes.coordinator(name="one", block_ms=50, lease_ms=1_000)
        assert served(lanes, worker, 1)
        lanes.connection.set(lanes.keys.leader, "99:thief")
        ids = lanes.push(requests(5))

        # I expect it to notice, by a script or a renewal that comes first or by moving what it
        # has read, and to move nothing more, also when it has stood by for some turns,
        eventually(lambda: "lost the lead" in caplog.text or "stands by (was" in caplog.text)
        for _ in range(3):
            lanes.connection.delete(lanes.keys.standbys)
            eventually(lambda: lanes.connection.exists(lanes.keys.standbys))
        assert lanes.load(worker) == 1
        assert lanes.connection.get(lanes.keys.leader) == b"99:thief"

        # and to lead again once the other is gone, with everything that waits.
        lanes.connection.delete(lanes.keys.leader)
        assert lanes.wait_for_load(worker, 6)[1:] == ids

    @pytest.mark.long
    def test_idle_leader_renews_a_short_lease_in_time(self, lanes: Lanes) -> None:
        # Given a lease that is shorter than the longest read
        lanes.coordinator(name="one", lease_ms=20_000, block_ms=60_000)

        # I expect it to be renewed, twice, in its first term.
        for _ in range(2):
            ends_ms = lanes.connection.pexpiretime(lanes.keys.leader)
            eventually(lambda ends=ends_ms: lanes.connection.pexpiretime(lanes.keys.leader) > ends)
        assert lanes.connection.get(lanes.keys.leader) == b"1:one"
        assert lanes.connection.hget(lanes.keys.info, "epoch") == b"1"

    def test_a_deleted_handshake_is_published_again(self, lanes: Lanes) -> None:
        # Given a leader in its first term, under whom all keys of the yard are deleted
        lanes.worker()
        lanes.coordinator(name="one", max_num_queued_reqs=77)
        eventually(lambda: lanes.connection.hget(lanes.keys.info, "models") == b'["sim"]')
        info = lanes.connection.hgetall(lanes.keys.info)
        assert (info[b"protocol"], info[b"coordinator"]) == (b"1", b"one")
        assert (info[b"default_model"], info[b"max_num_queued_reqs"]) == (b"sim", b"77")
        lanes.connection.delete(*lanes.connection.keys(f"*{lanes.keys.yard}*"))

        # I expect it to lead a yard that clients find.
        eventually(lambda: lanes.connection.hget(lanes.keys.info, "protocol") == b"1")
        assert lanes.connection.get(lanes.keys.leader) == b"1:one"
        lanes.worker()
        with Client(lanes.url, lanes.keys.yard) as client:
            client.submit([1])


GOOD = {"id": "good", "prompt": "p"}
#: Entries that must be answered, and the field that the message has to name.
REFUSED = {
    "broken JSON": ({"prompt": "p", "params": "{"}, "params"),
    "no prompt": ({}, "prompt"),
    "parameter out of range": ({"prompt": "p", "params": '{"top_p":7}'}, "params.top_p"),
    "a number of ten thousand digits": ({"prompt": "p", "deadline": "9" * 10_000}, "deadline"),
    "deep metadata": ({"prompt": "p", "metadata": "[" * 100_000}, "metadata"),
    "not UTF-8": ({"prompt": b"\xff\xfe"}, "prompt"),
    "another's replies": ({"prompt": "p", "reply_to": "replies:other"}, "reply_to"),
    "thousands of fields": ({"prompt": "p"} | {f"f{n}": "x" for n in range(5_000)}, "entry"),
    "more bytes than allowed": ({"prompt": "x" * 1_200_000}, "request"),
}
#: Entries without anyone to answer.
BURIED = {
    "no id": {"prompt": "p"},
    "long id": {"id": "x" * 201, "prompt": "p"},
    "id that is not UTF-8": {"id": b"\xff", "prompt": "p"},
    "client that forges a key": {"id": "x", "client": "a}/b", "prompt": "p"},
    "thousands of fields": {f"f{n}": "x" for n in range(5_000)},
}


class TestHostileEntries:
    def test_a_hostile_entry_is_answered_and_the_next_good_one_is_served(
        self, lanes: Lanes
    ) -> None:
        # Given bad entries of every kind, then a good one
        worker = lanes.worker()
        lanes.coordinator(max_request_bytes=1_000_000)
        for name, (fields, _) in REFUSED.items():
            lanes.push_raw({"id": name, **fields})
        lanes.push_raw(GOOD)

        # I expect an answer that names the field for each, and the good one on the lane.
        for name, (_, field) in REFUSED.items():
            result = to_result(lanes.result(name))
            assert (result.status, result.error.code) == ("failed", "INVALID_REQUEST"), name
            assert result.error.message.startswith(field), (name, result.error.message)
            assert [to_result(reply) for reply in lanes.replies(name)] == [result]
        assert lanes.wait_for_load(worker, 1) == ["good"]
        assert lanes.waiting() == 0

    def test_unanswerable_entries_are_buried(self, lanes: Lanes) -> None:
        worker = lanes.worker()
        lanes.coordinator()
        for fields in BURIED.values():
            lanes.push_raw(fields)
        lanes.push_raw(GOOD)

        eventually(lambda: len(lanes.dead()) == len(BURIED))
        assert all(letter[b"dead_reason"] for letter in lanes.dead())
        assert lanes.wait_for_load(worker, 1) == ["good"]
        assert lanes.waiting() == 0

    def test_forged_events_are_ignored(self, lanes: Lanes) -> None:
        # Given forged wake-ups
        worker = lanes.worker()
        lanes.coordinator()
        for fields in (
            {"event": "capacity", "worker": worker, "count": "9" * 5_000},
            {"event": "capacity", "worker": b"\xff", "count": "1"},
            {"event": "capacity"},
            {b"\xff": b"\xff"},
        ):
            for stream in (lanes.keys.events, lanes.keys.capacity):
                lanes.connection.xadd(stream, fields)

        assert served(lanes, worker)

    def test_unreadable_roster_entries_are_ignored(self, lanes: Lanes) -> None:
        worker = lanes.worker()
        lanes.connection.hset(lanes.keys.workers, "rubbish", "{")
        lanes.connection.hset(lanes.keys.workers, b"\xff", "{}")
        lanes.connection.zadd(lanes.keys.leases, {"rubbish": 9e15, b"\xff": 9e15})
        lanes.coordinator()

        assert served(lanes, worker)

    def test_another_request_with_a_known_id_is_a_dead_letter(self, lanes: Lanes) -> None:
        # Given a request that runs, and others of the same id,
        worker = lanes.worker()
        lanes.coordinator()
        lanes.push_raw({"id": "q1", "prompt": "one"})
        lanes.wait_for_load(worker, 1)
        lanes.push_raw({"id": "q1", "prompt": "two"})
        lanes.push_raw({"id": "q1", "prompt": "one", "params": '{"top_p":7}'})
        lanes.push_raw({"id": "q1", "prompt": "one", "stream": "1"})
        eventually(lambda: lanes.waiting() == 0)

        # I expect those that are not the same among the dead letters, with the reason,
        letters = lanes.dead()
        assert sorted(letter[b"prompt"] for letter in letters) == [b"one", b"two"]
        reason = b"ID_REUSED: the id 'q1' is known with another request"
        assert {letter[b"dead_reason"] for letter in letters} == {reason}

        # and the first to be answered, alone.
        [assignment] = lanes.lane(worker)
        assert assignment.request.prompt == "one"
        lanes.finish(worker, assignment)
        *told, reply = lanes.replies("q1")
        assert (reply.event, reply.status) == ("result", "completed")

        # The submitters of the others are told, beside that.
        assert [(one.event, one.tokens) for one in told] == [("delta", b"")] * 2
        assert all("ID_REUSED" in (one.error or "") for one in told)

    def test_bad_input_is_answered_while_all_lanes_are_full(self, lanes: Lanes) -> None:
        worker = lanes.worker(lane_limit=1)
        lanes.coordinator()
        lanes.push(requests(5))
        lanes.wait_for_load(worker, 1)

        lanes.push_raw({"id": "x"})

        assert to_result(lanes.result("x")).error.code == "INVALID_REQUEST"

    def test_processes_survive_hostile_entries(self, valkey_broker: Server) -> None:
        # Given real processes, and entries of which some reach the engine
        with Plant(valkey_broker.url) as plant:
            coordinator, controller = plant.coordinator(), plant.worker(slots=2)
            plant.wait_for_workers(2)
            before = [coordinator.pid, *(child.pid for child in controller.children())]
            intake = plant.keys.intake("normal")
            engine_refuses = {
                "out of vocabulary": {"tokens": "[31999,32000]"},
                "far out of vocabulary": {"tokens": "[2147483647]"},
                "1 MB prompt": {"prompt": "x" * 1_000_000},
                "stop id out of vocabulary": {
                    "prompt": "p",
                    "params": '{"stop_token_ids":[32000]}',
                },
                "simulated logprobs": {"prompt": "p", "params": '{"logprobs":1}'},
            }
            hostile = {name: fields for name, (fields, _) in REFUSED.items()} | engine_refuses
            del hostile["more bytes than allowed"]
            for name, fields in hostile.items():
                plant.connection.xadd(intake, {"id": name, **fields})
            for fields in BURIED.values():
                plant.connection.xadd(intake, fields)
            lane = plant.keys.lane(next(iter(plant.roster())))
            plant.connection.xadd(lane, {"id": "forged", "prompt": "p", "attempt": "abc"})
            plant.connection.xadd(lane, {"x": "y"})

            # I expect an answer or a dead letter for each, and a good request to be served
            for name in hostile:
                result = plant.result(name)
                assert result.error.code == "INVALID_REQUEST", (name, result)
            eventually(lambda: plant.connection.xlen(plant.keys.dead) == len(BURIED))
            good = [make_request(params=SamplingParams(max_tokens=3)) for _ in range(4)]
            plant.push_all(good)
            assert all(result.ok for result in plant.results(good))
            assert plant.connection.xlen(lane) == 0

            # by the same processes.
            assert coordinator.is_running
            assert [coordinator.pid, *(child.pid for child in controller.children())] == before


class TestBrokenBroker:
    def test_deleted_streams_are_created_again(self, lanes: Lanes) -> None:
        worker, keys = lanes.worker(), lanes.keys
        lanes.coordinator(block_ms=50)
        assert served(lanes, worker)

        intakes = [keys.intake(name) for name in INTAKE_CLASSES]
        for streams in (intakes, [keys.events, keys.arrivals, keys.capacity]):
            lanes.connection.delete(*streams)

            assert served(lanes, worker)

    def test_a_coordinator_survives_killed_connections(self, lanes: Lanes) -> None:
        worker = lanes.worker(lane_limit=4)
        lanes.coordinator(lease_ms=60_000)
        ids = lanes.push(requests(40))
        order = []

        for _ in range(4):
            order += lanes.serve([worker], 10)
            lanes.connection.client_kill_filter(_type="normal", skipme=True)

        assert order == ids


class TestStartAndStop:
    def test_constructor_touches_neither_network_nor_disk(self, tmp_path) -> None:
        url = f"redis://127.0.0.1:{free_port()}"

        Coordinator(CoordinatorSettings(redis_url=url, record=tmp_path / "record"))

        assert not (tmp_path / "record").exists()

    def test_stop_before_run(self, lanes: Lanes) -> None:
        coordinator = Coordinator(lanes.settings())
        coordinator.stop()
        coordinator.stop()

        assert coordinator.run() == 0
        assert not lanes.connection.exists(lanes.keys.leader)

    def test_stop_without_a_server(self) -> None:
        url = f"redis://127.0.0.1:{free_port()}"
        coordinator = Coordinator(CoordinatorSettings(redis_url=url))
        thread = threading.Thread(target=coordinator.run)
        thread.start()

        coordinator.stop()
        coordinator.stop()

        thread.join(STOP_S)
        assert not thread.is_alive()

    def test_a_coordinator_waits_for_a_server_that_starts_later(
        self, own_broker: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        own_broker.stop()
        lanes = Lanes(own_broker.url)
        coordinator = Coordinator(lanes.settings())
        thread = threading.Thread(target=coordinator.run)
        thread.start()
        try:
            eventually(lambda: "trying again" in caplog.text)
            assert not coordinator.wait_until_ready(0.0)
            own_broker.start()
            assert coordinator.wait_until_ready(STOP_S)
        finally:
            coordinator.stop()
            thread.join(STOP_S)
            lanes.close()
        assert not thread.is_alive()

    def test_a_standby_loads_its_scripts_when_it_starts(self, own_broker: Server) -> None:
        """Clients of its release may need them, while a coordinator of another one leads."""
        lanes = Lanes(own_broker.url)
        lanes.connection.set(lanes.keys.leader, "99:another")
        with running(Coordinator(lanes.settings(lease_ms=LONG_MS))):
            assert all(lanes.connection.script_exists(*map(digest, script_names())))
        assert lanes.connection.get(lanes.keys.leader) == b"99:another"
        lanes.close()

    @pytest.mark.long
    def test_sigterm_ends_the_program_with_0(self, valkey_broker: Server) -> None:
        with Plant(valkey_broker.url) as plant:
            program = plant.coordinator()
            plant.wait_for_leader()

            assert program.stop() == 0
            assert not plant.connection.exists(plant.keys.leader)
