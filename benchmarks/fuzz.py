"""Does any entry on the wire crash, hang or silence a yard? Generated entries by plain XADD.

A real coordinator and two simulated workers receive valid requests with fields torn, swapped,
doubled, overlong, of the wrong type or not UTF-8, entries without an address, and rubbish on the
lanes and among the events. Every id that can be answered must have exactly one result, every other
entry must be a dead letter, no process may be replaced, and the yard must still serve a valid
request at the end.

    python -m benchmarks.fuzz [--entries 100000] [--seed N] [--json]
"""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import click
import redis

from benchmarks.measure import print_table
from benchmarks.progress import publish
from benchmarks.yard import ServingYard, embedded_broker, simulated_yard
from tokenyard import Client
from tokenyard.protocol.digest import entry_digest
from tokenyard.protocol.keys import INTAKE_CLASSES, Keys
from tokenyard.protocol.parse import parse_request
from tokenyard.protocol.replies import TERMINAL, decode_replies
from tokenyard.protocol.wire import Unanswerable, pack_tokens

Fields = dict[bytes, bytes]
BATCH = 500
#: Seconds after which anything counts as hung.
PATIENCE_S = 600.0
DEAD_MAXLEN = 10_000_000
#: Consecutive requests that may share a stream of replies.
LISTENED = 1_000
_REUSED = b"ID_REUSED"
BAD = [
    "unanswered",
    "answered_twice",
    "ids_reused_in_vain",
    "dead_letters_missing",
    "processes_lost",
]
#: Outcomes that enough entries must reach.
TRIED = ["completed", "framed", "refused", "ids_reused", "dead_letters", "strays"]


def sound(draw: random.Random, number: int) -> Fields:
    """Make a valid request."""
    prompts: list[tuple[bytes, bytes]] = [
        (b"prompt", b"12+34="),
        (b"tokens", pack_tokens([draw.randrange(1000) for _ in range(draw.randrange(1, 40))])),
        (b"tokens", json.dumps([draw.randrange(1000) for _ in range(5)]).encode()),
        (b"messages", b'[{"role":"user","content":"12+34="}]'),
        (b"messages", b'[{"role":"user","content":[{"type":"text","text":"12+34="}]}]'),
    ]
    params = {"max_tokens": draw.randrange(1, 20), "temperature": draw.choice([0, 0.5])}
    return {
        b"id": b"fuzz-%d" % number,
        b"params": json.dumps(params).encode(),
        **dict([draw.choice(prompts)]),
        **({b"stream": b"1"} if draw.random() < 0.3 else {}),
        **(_listener(number) if draw.random() < 0.2 else {}),
    }


def _listener(number: int) -> Fields:
    """A client that gets its replies in frames, few enough for its stream to keep them all."""
    client = b"fuzz-client-%d" % (number // LISTENED)
    return {b"client": client, b"reply_to": b"replies:" + client}


def fold(fields: Fields) -> Fields:
    """Move all fields but the id and the prompt into the field `shared`."""
    own: Fields = {name: fields[name] for name in (b"id", b"tokens", b"prompt") if name in fields}
    rest = {name.decode(): fields[name].decode() for name in fields.keys() - own.keys()}
    return {**own, b"common": json.dumps(rest).encode()}


def rubbish(draw: random.Random) -> bytes:
    """A value that a client might send by mistake or on purpose."""
    makers: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: draw.randbytes(draw.randrange(1, 60)),
        lambda: str(draw.choice([-1, 0, 2**31, 2**63, 10**30, 1.5, "NaN", "1e400"])).encode(),
        lambda: draw.choice([b"null", b"true", b"{", b"[", b"[]", b"{}", b'"', b"[[", b"\x00"]),
        lambda: b"[" * draw.choice([10, 2000]),
        lambda: json.dumps({draw.choice(KNOWN_PARAMS): draw.choice(ODD)}).encode(),
        lambda: json.dumps([draw.choice(ODD) for _ in range(3)]).encode(),
        lambda: b"x" * draw.choice([201, 5_000, 70_000]),
        "\u202e\U0001f600\x00é".encode,
        lambda: b"*" * 3 + b"\r\n$5\r\nhello",
    ]
    return draw.choice(makers)()


KNOWN_PARAMS = ["n", "temperature", "top_p", "seed", "stop", "max_tokens", "logprobs", "tempo"]
ODD: list[Any] = [None, True, -1, 0, 2**70, 1e308, "", "x", [], {}, [None], {"a": 1}, [[1]]]
NAMES = [b"id", b"client", b"prompt", b"tokens", b"messages", b"model", b"params", b"stream"]
NAMES += [b"tools", b"documents", b"chat_template_kwargs", b"continue_final_message"]
NAMES += [b"reply_to", b"priority", b"deadline", b"result_ttl", b"metadata", b"v", b"tenant"]
NAMES += [b"sid", b"attempt", b"crashes", b"published", b"faults", b"not_before", b"cancel"]
NAMES += [b"common"]


def mangle(draw: random.Random, fields: Fields) -> Fields:
    """Add one to three faults to a valid request."""
    for _ in range(draw.randrange(1, 4)):
        match draw.randrange(5):
            case 0:
                fields.pop(draw.choice(list(fields)), None)
            case 1 | 2:
                fields[draw.choice(NAMES)] = rubbish(draw)
            case 3:
                fields[draw.randbytes(draw.randrange(1, 9))] = rubbish(draw)
            case 4:
                cut = draw.choice(list(fields))
                fields[cut] = fields[cut][: draw.randrange(len(fields[cut]) + 1)]
        fields = fields or {b"empty": b""}
    return fields


@dataclass(slots=True)
class Sent:
    """The added entries, and their expected outcomes."""

    entries: int = 0
    #: Number of entries of each request: by client and id, then by digest.
    answerable: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    unanswerable: int = 0

    def note(self, fields: Mapping[bytes, bytes]) -> None:
        """Parse an entry as the coordinator does, and count it."""
        self.entries += 1
        request = parse_request(fields)
        if isinstance(request, Unanswerable):
            self.unanswerable += 1
        else:
            requests = self.answerable.setdefault((request.client, request.id), Counter())
            requests[entry_digest(fields)] += 1

    def may_be_reused(self, client: str, request_id: str) -> int:
        """Most entries whose id another request may hold: any of them may arrive first."""
        requests = self.answerable.get((client, request_id), Counter())
        return requests.total() - min(requests.values(), default=0)


def generate(draw: random.Random, count: int) -> Iterator[Fields]:
    """Generate entries, of which about one in five is valid and one in fifty repeats another."""
    last = sound(draw, 0)
    for number in range(count):
        if draw.random() < 0.02:
            yield last
            continue
        fields = sound(draw, number)
        if draw.random() < 0.3:
            fields = fold(fields)
        last = fields if draw.random() < 0.2 else mangle(draw, fields)
        yield last


class Fuzzer:
    """Sends entries to a yard and checks their outcomes."""

    def __init__(self, yard: ServingYard, seed: int) -> None:
        self._keys = Keys(yard.name)
        self._connection = redis.Redis.from_url(yard.url, protocol=2)
        self._draw = random.Random(seed)
        self.sent = Sent()
        self.strays = 0  # rubbish on lanes

    def send(self, count: int) -> None:
        """Add entries to all intakes but the system's own, and rubbish to its internal streams."""
        pipeline = self._connection.pipeline(transaction=False)
        for fields in generate(self._draw, count):
            self.sent.note(fields)
            stream = self._keys.intake(self._draw.choice(INTAKE_CLASSES[1:]))
            entry: dict[Any, Any] = dict(fields)
            pipeline.xadd(stream, entry)
            if len(pipeline) >= BATCH:
                self._disturb(pipeline)
                pipeline.execute()
        pipeline.execute()

    def _disturb(self, pipeline: Any) -> None:
        for lane in self._lanes():
            stray: dict[Any, Any] = mangle(self._draw, {b"cancel": b"1-0", b"id": b"none"})
            pipeline.xadd(lane, stray)
            self.strays += 1
        event: dict[Any, Any] = mangle(self._draw, {b"event": b"capacity", b"count": b"1"})
        pipeline.xadd(self._keys.events, event)
        pipeline.xadd(self._keys.capacity, event)

    def wait_until_quiet(self) -> None:
        """Wait until no request waits or runs; exits if that does not happen."""
        until = time.monotonic() + PATIENCE_S
        while left := self._left():
            if time.monotonic() > until:
                sys.exit(f"still {left} entries in the yard after {PATIENCE_S:g} s")
            time.sleep(0.2)

    def _left(self) -> int:
        pipeline = self._connection.pipeline(transaction=False)
        for name in INTAKE_CLASSES:
            pipeline.xlen(self._keys.intake(name))
        for lane in self._lanes():
            pipeline.xlen(lane)
        return sum(pipeline.execute())

    def _lanes(self) -> list[str]:
        workers: Any = self._connection.hkeys(self._keys.workers)
        return [self._keys.lane(worker.decode()) for worker in workers]

    def check(self) -> dict[str, int]:
        """Count the outcomes of all ids and entries."""
        found: Counter[str] = Counter()
        framed = self._framed()
        for client, request_id in sorted(self.sent.answerable):
            found[self._outcome(client, request_id, framed)] += 1
        letters = list(self._dead_without_answer())
        reused = Counter(one for reason, one in letters if reason.startswith(_REUSED))
        dead = len(letters) - reused.total()
        return {
            "entries": self.sent.entries,
            "framed": framed.total(),
            "ids": len(self.sent.answerable),
            "completed": found["completed"],
            "refused": found["failed"] + found["expired"],
            "unanswered": found["unanswered"],
            "answered_twice": found["twice"],
            "ids_reused": reused.total(),
            "ids_reused_in_vain": sum(
                count > self.sent.may_be_reused(*one) for one, count in reused.items()
            ),
            "dead_letters": dead,
            "strays": self.strays,
            "dead_letters_missing": self.sent.unanswerable - dead,
        }

    def _framed(self) -> Counter[tuple[str, str]]:
        """Results in frames, by client and id."""
        results: Counter[tuple[str, str]] = Counter()
        for client in {client for client, _ in self.sent.answerable}:
            entries: Any = self._connection.xrange(self._keys.replies(client))
            for reply in (one for _, fields in entries for one in decode_replies(fields)):
                results[client, reply.id] += reply.event == "result"
        return results

    def _outcome(self, client: str, request_id: str, framed: Counter[tuple[str, str]]) -> str:
        pipeline = self._connection.pipeline(transaction=False)
        pipeline.hget(self._keys.ledger(client, request_id), "state")
        pipeline.xrange(self._keys.reply(client, request_id))
        state, replies = pipeline.execute()
        flat = sum(fields.get(b"event") == b"result" for _, fields in replies)
        state = (state or b"").decode()
        if state not in TERMINAL or not (flat or framed[client, request_id]):
            return "unanswered"
        # Entries of one id may name either place; neither may hold two results.
        return "twice" if max(flat, framed[client, request_id]) > 1 else state

    def _dead_without_answer(self) -> Iterator[tuple[bytes, tuple[str, str]]]:
        """Reason, client and id of the dead letters of entries without a result."""
        after, read = "-", cast("Any", self._connection.xrange)
        while page := read(self._keys.dead, after, "+", count=1000):
            for _, fields in page:
                reason = fields.get(b"dead_reason", b"")
                if not reason.startswith((b"POISONED", b"INFERENCE_ERROR", b"WORKER_LOST")):
                    request = parse_request(fields)
                    if isinstance(request, Unanswerable):
                        yield reason, ("", "")
                    else:
                        yield reason, (request.client, request.id)
            after = "(" + page[-1][0].decode()


def faults(figures: Mapping[str, Any]) -> Iterator[str]:
    """Broken promises, and outcomes too rare for the run to prove anything, in words."""
    for name in BAD:
        if figures[name]:
            yield f"{name}: {figures[name]}"
    for name in TRIED:
        if not figures[name]:
            yield f"{name}: none, so nothing was tried"
    if figures["next_good_request"] != "completed":
        yield f"next_good_request: {figures['next_good_request']}"


@click.command(context_settings={"show_default": True})
@click.option("--entries", default=100_000, help="Entries to send.")
@click.option("--seed", type=int, help="What the entries follow from.  [default: a random one]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(entries: int, seed: int | None, as_json: bool) -> None:
    """Send generated entries to a yard and check that each is answered or buried."""
    seed = secrets.randbits(32) if seed is None else seed
    with (
        embedded_broker() as broker,
        simulated_yard(
            broker,
            "fuzz",
            workers=2,
            max_num_seqs=64,
            coordinator_options=["--dead-maxlen", str(DEAD_MAXLEN)],
        ) as yard,
    ):
        fuzzer = Fuzzer(yard, seed)
        began = time.perf_counter()
        fuzzer.send(entries)
        fuzzer.wait_until_quiet()
        figures: dict[str, Any] = {"seed": seed, **fuzzer.check()}
        figures["seconds"] = round(time.perf_counter() - began, 1)
        figures["processes_lost"] = yard.missing()
        with Client(yard.url, yard=yard.name) as client:
            figures["next_good_request"] = client.submit("12+34=").result(60).status
    title = "Generated entries against a running yard"
    publish(figures, lambda: print_table(title, ("", ""), figures.items()), as_json=as_json)
    sys.exit("\n".join(faults(figures)) or 0)


if __name__ == "__main__":
    main()
