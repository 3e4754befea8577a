"""The models that a gateway follows: ready before anybody asks, replaced, and forgotten."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway import models
from gateway.announcements import ModelProfile, OwnRules
from gateway.http.errors import GatewayError
from gateway.models import ModelWatch
from tests.support.fake_clock import FakeClock
from tests.unit.gateway.test_announcements import host, model
from tokenyard.protocol.keys import Keys
from tokenyard.protocol.worker_info import WorkerInfo, WorkerState, encode_worker

KEYS = Keys("test")


def anything(_: str) -> bool:
    return True


class Broker:
    """The hashes that a gateway reads."""

    def __init__(self) -> None:
        self.hosts: dict[bytes, bytes] = {}
        self.roster: dict[bytes, bytes] = {}
        self.leases: dict[bytes, float] = {}

    async def command(self, name: str, key: str, *_: str) -> object:
        if name == "HGETALL":
            return dict(self.hosts if key == KEYS.hosts else self.roster)
        assert (name, key) == ("ZRANGE", KEYS.leases)
        return [worker for worker, expiry in self.leases.items() if expiry > 0]

    def join(
        self,
        name: str,
        state: WorkerState,
        model_name: str = "",
        lease: float = 1.0,
        controller: str = "",
    ) -> None:
        info = WorkerInfo(
            name=name, state=state, model=model_name, max_model_len=77, controller=controller
        )
        self.roster[name.encode()] = encode_worker(info)
        self.leases[name.encode()] = lease


class Ends:
    """Front ends that take as long as a test wants."""

    def __init__(self) -> None:
        self.asked: list[ModelProfile] = []
        self.forgotten: list[ModelProfile] = []
        self.broken: set[str] = set()
        self.strange: set[str] = set()  # vLLM raises for these what nobody expects
        self.failed: list[tuple[ModelProfile, float]] = []
        self.may_finish = asyncio.Event()
        self.may_finish.set()

    async def state_of(self, profile: ModelProfile) -> object:
        self.asked.append(profile)
        await self.may_finish.wait()
        if profile.path in self.broken:
            self.failed.append((profile, time.monotonic()))
            raise GatewayError(503, f"no {profile.path}")
        if profile.path in self.strange:
            self.failed.append((profile, time.monotonic()))
            raise LookupError(profile.path)
        return object()

    def forget(self, profile: ModelProfile) -> None:
        self.forgotten.append(profile)
        self.failed = [one for one in self.failed if one[0] != profile]

    def failed_at(self, profile: ModelProfile) -> float | None:
        return next((at for one, at in self.failed if one == profile), None)

    def fault(self, profile: ModelProfile) -> str:
        return f"no {profile.path}" if self.failed_at(profile) is not None else ""

    def max_model_len(self, profile: ModelProfile) -> int | None:
        return profile.arguments.get("max_model_len")


class Rig:
    """A watch with all that it looks at."""

    def __init__(self) -> None:
        self.broker, self.ends = Broker(), Ends()
        queue = SimpleNamespace(broker=self.broker, keys=KEYS)
        self.watch = ModelWatch(cast(Any, queue), cast(Any, self.ends), 1.0, OwnRules())

    async def announce(self, hosts: dict[bytes, bytes]) -> None:
        self.broker.hosts = hosts
        await self.look()

    async def look(self) -> None:
        await self.watch.look()
        await self.settled()

    async def settled(self) -> None:
        """Wait until no model is being made ready."""
        while self.watch._preparing:
            await asyncio.gather(*self.watch._preparing.values(), return_exceptions=True)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_model_is_made_ready_before_anybody_asks(rig: Rig) -> None:
    await rig.announce(host("a", model(adapters=("lora",))))
    await rig.look()

    assert [one.name for one in rig.ends.asked] == ["m"], "once"
    assert set(rig.watch.profiles) == {"m", "lora"}
    assert rig.watch.profiles["lora"].name == "m"


async def test_a_model_may_appear_later(rig: Rig) -> None:
    await rig.look()
    assert not rig.watch.profiles

    await rig.announce(host("a", model()))

    assert set(rig.watch.profiles) == {"m"}


async def test_new_settings_count_once_they_are_ready(rig: Rig) -> None:
    await rig.announce(host("a", model()))
    old = rig.watch.profiles["m"]
    rig.ends.may_finish.clear()
    rig.broker.hosts = host("a", model(max_model_len=5))

    await rig.watch.look()
    assert rig.watch.profiles["m"] is old, "still served"
    rig.ends.may_finish.set()
    await rig.settled()

    assert rig.watch.profiles["m"].arguments["max_model_len"] == 5
    assert rig.ends.forgotten == [old]


async def test_settings_that_are_taken_back_never_count(rig: Rig) -> None:
    first, other = host("a", model()), host("a", model(max_model_len=5))
    await rig.announce(first)
    rig.ends.may_finish.clear()
    for entries in (other, first):
        rig.broker.hosts = entries
        await rig.watch.look()
        await asyncio.sleep(0)
    rig.ends.may_finish.set()
    await rig.look()

    assert "max_model_len" not in rig.watch.profiles["m"].arguments


async def test_a_model_outlives_the_loss_of_the_brokers_data_and_is_forgotten_later(
    rig: Rig,
    fake_clock: FakeClock,
) -> None:
    await rig.announce(host("a", model()))
    # Whether workers name its host or not
    fake_clock.advance(86_400)
    await rig.look()
    await rig.announce({})
    assert set(rig.watch.profiles) == {"m"}

    fake_clock.advance(models._FORGET_S + 1)
    await rig.look()

    assert not rig.watch.profiles
    assert [one.name for one in rig.ends.forgotten] == ["m"]
    # It may come back.
    await rig.announce(host("a", model()))
    assert set(rig.watch.profiles) == {"m"}


async def test_a_model_that_cannot_be_served_is_complained_of_once_and_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.ends.broken = {"/models/m"}
    await rig.announce(host("a", model(), model("n")))
    await rig.look()
    assert [one.name for one in rig.ends.asked] == ["m", "n"]
    assert (await rig.watch.card("m", anything))["fault"] == "no /models/m"
    assert "fault" not in await rig.watch.card("n", anything)

    monkeypatch.setattr(models, "_AGAIN_S", 0.0)
    await rig.look()
    rig.ends.broken = set()
    await rig.look()

    assert "fault" not in await rig.watch.card("m", anything)
    assert [record.message for record in caplog.records] == ["no /models/m"]


async def test_a_model_whose_new_settings_fail_for_an_unforeseen_reason_is_tried_again(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await rig.announce(host("a", model(max_model_len=1)))
    rig.ends.strange = {"/models/m"}
    await rig.announce(host("a", model(max_model_len=2)))
    assert "fault" in await rig.watch.card("m", anything)

    rig.ends.strange = set()
    monkeypatch.setattr(models, "_AGAIN_S", 0.0)
    await rig.look()

    assert rig.watch.profiles["m"].arguments["max_model_len"] == 2
    assert "fault" not in await rig.watch.card("m", anything)


async def test_the_roster_decides_between_hosts_that_differ(rig: Rig) -> None:
    rig.broker.hosts = host("a", model(max_model_len=1)) | host("b", model(max_model_len=2))
    worker = WorkerInfo(name="w", state="ready", controller="b")
    rig.broker.roster = {b"w": encode_worker(worker), b"x": b"{"}
    rig.broker.leases = {b"w": 5.0, b"x": 5.0}
    await rig.look()
    assert rig.watch.profiles["m"].arguments["max_model_len"] == 2

    rig.broker.leases = {b"w": -1.0}
    await rig.look()
    assert rig.watch.profiles["m"].arguments["max_model_len"] == 1


async def test_the_list_has_the_form_of_openai_and_the_fields_of_vllm(rig: Rig) -> None:
    rig.broker.hosts = host("a", model(adapters=("lora",), max_model_len=5), model("n"), model("o"))
    rig.broker.join("w1", "asleep", "n")
    rig.broker.join("w2", "ready", "m")
    rig.broker.join("w3", "ready", "o", lease=0.0)
    await rig.look()

    listed = await rig.watch.cards(anything)

    assert listed["object"] == "list"
    told = {card["id"]: card for card in listed["data"]}
    assert told["lora"] == {
        "id": "lora",
        "object": "model",
        "created": 0,
        "owned_by": "tokenyard",
        "root": "lora",
        "parent": "m",
        "max_model_len": 5,
        "state": "warm",
    }
    assert (told["m"]["parent"], told["m"]["root"]) == (None, "/models/m")
    assert [told[name]["state"] for name in "mno"] == ["warm", "asleep", "cold"]
    assert told["n"]["max_model_len"] == 77, "its worker knows"
    with pytest.raises(GatewayError) as refused:
        await rig.watch.card("nobody's", anything)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert str(refused.value).endswith("see GET /v1/models")


async def test_a_misspelt_name_gets_the_closest_one_that_may_be_used(rig: Rig) -> None:
    await rig.announce(host("a", model("llama-70b"), model("llama-8b")))
    with pytest.raises(GatewayError, match="did you mean llama-8b"):
        rig.watch.find({"model": "lama-8b"}, anything)
    with pytest.raises(GatewayError, match="did you mean llama-70b"):
        rig.watch.find({"model": "lama-8b"}, lambda name: name == "llama-70b")
    with pytest.raises(GatewayError, match="see GET /v1/models"):
        rig.watch.find({"model": "lama-8b"}, lambda _: False)


async def test_no_model_is_unknown_before_any_host_has_told_its_models(rig: Rig) -> None:
    await rig.look()
    with pytest.raises(GatewayError) as refused:
        rig.watch.find({"model": "m"}, anything)
    assert (refused.value.status, "retry-after" in refused.value.headers) == (503, True)

    await rig.announce(host("a", model()))
    assert rig.watch.find({}, anything).name == "m"


async def test_the_list_shows_why_a_model_cannot_be_loaded(rig: Rig) -> None:
    broken = msgspec.structs.replace(model(adapters=("lora",)), fault="no option 'x'", faults=1)
    held = msgspec.structs.replace(model("held"), fault="too large", faults=2)
    rig.broker.hosts = host("a", broken, held)
    rig.broker.join("w", "ready", "held")
    await rig.look()

    told = {card["id"]: card for card in (await rig.watch.cards(anything))["data"]}

    why = "it cannot be loaded: no option 'x'"
    assert [(told[one]["state"], told[one]["fault"]) for one in ("m", "lora")] == [
        ("failed", why),
        ("failed", why),
    ]
    assert (told["held"]["state"], told["held"].get("fault")) == ("warm", None)

    # Another host can load it.
    rig.broker.hosts |= host("b", model(adapters=("lora",)))
    rig.broker.join("b", "warm", controller="b")
    await rig.look()
    assert (await rig.watch.card("m", anything))["state"] == "cold"
