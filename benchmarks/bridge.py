"""What does a front end with a bridge cost, compared with the gateway before the same workers?

A yard with simulated workers, whose tokens cost nothing; before it in turn the gateway, and
`vllm-rs` with a bridge. A client asks both for the same streams, and for short whole answers, and
compares what they say. CPU time is that of the servers before the queue.

    python -m benchmarks.bridge [--front vllm-rs] [--rounds 3] [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
import psutil
import uvloop

from benchmarks.cold_start.case import WrongAnswer
from benchmarks.cold_start.serve import HOST, ask
from benchmarks.llama import write_tokenizer
from benchmarks.machine import machine
from benchmarks.measure import cpu_seconds, print_table
from benchmarks.progress import publish, tell
from benchmarks.yard import STOP_S, embedded_broker, end_in_order, last_lines, simulated_yard
from tokenyard.process.children import start_child, stop_child
from tokenyard.process.embedded_broker import free_port

_MODEL: Final = "sim"
_VOCABULARY: Final = 32_000
_MAX_MODEL_LEN: Final = 8192
_START_S: Final = 300.0
_POLL_S: Final = 0.02
_CLIENT_S: Final = 300.0
#: A step of the engine: 64 streams are then 1,280 tokens a second.
_STEP_S: Final = 0.05
_STREAM_TOKENS: Final = 100
_SHORT_TOKENS: Final = 4
_IN_FLIGHT: Final = 128


@dataclass(frozen=True, slots=True)
class Side:
    """What stands before the queue."""

    url: str
    pids: Mapping[str, Sequence[int]]
    start_s: float

    @property
    def rss_mib(self) -> float:
        """Resident memory of all its processes."""
        pids = itertools.chain.from_iterable(self.pids.values())
        return float(sum(psutil.Process(pid).memory_info().rss for pid in pids)) / 2**20


@dataclass(frozen=True, slots=True)
class Load:
    """One load on one side."""

    texts: Sequence[str]
    seconds: float
    first_ms: float  # median time to the first event
    cpu_us: Mapping[str, float]  # of a token, or of an answer, by program

    @property
    def per_s(self) -> float:
        """Answers per second."""
        return len(self.texts) / self.seconds


def write_model(folder: Path) -> Path:
    """The tokenizer and the configuration of the simulated engine; it has no weights."""
    write_tokenizer((f"w{number}" for number in range(_VOCABULARY)), "w0", folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": _MAX_MODEL_LEN,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Door:
    """A program that takes requests by HTTP."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._program = words[0]
        self._port = free_port()
        self._log = log
        here = ["--host", HOST, "--port", str(self._port)]
        self.url = f"http://{HOST}:{self._port}"
        self.process = start_child([sys.executable, "-m", *words, *here], log)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def wait_until_ready(self, model: str) -> None:
        """Wait until it lists the model; raises `ChildProcessError` or `TimeoutError`."""
        until = time.monotonic() + _START_S
        while not self._lists(model):
            words = last_lines(self._log.read_text(errors="replace"))
            if self.process.poll() is not None:
                raise ChildProcessError(f"{self._program} has ended:\n{words}")
            if time.monotonic() > until:
                raise TimeoutError(f"{self._program} does not list {model!r}:\n{words}")
            time.sleep(_POLL_S)

    def _lists(self, model: str) -> bool:
        try:
            listed = json.load(ask(self._port, "GET", "/v1/models"))["data"]
        except (OSError, ValueError, KeyError):
            return False
        return model in {one["id"] for one in listed}


@contextmanager
def running_door(words: Sequence[str]) -> Iterator[Door]:
    """Run ``python -m WORDS``; it serves after `Door.wait_until_ready`."""
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        door = Door(words, Path(folder) / "log")
        try:
            yield door
        finally:
            stop_child(door.process, STOP_S)


@contextmanager
def side(name: str, url: str, yard: str, path: Path, model: str = _MODEL) -> Iterator[Side]:
    """Start the gateway, or a front end with its bridge."""
    queue = ["--redis-url", url, "--yard", yard]
    words = ["gateway", "--model-paths", f"{model}={path}", *queue]
    if name != "gateway":
        words = ["gateway.bridge", "--front", name, "--model", model, *queue, "--", str(path)]
    began = time.monotonic()
    with running_door(words) as door:
        door.wait_until_ready(model)
        yield Side(door.url, _programs(door.pid, name), time.monotonic() - began)


def _programs(pid: int, name: str) -> Mapping[str, Sequence[int]]:
    if name == "gateway":
        return {"gateway": [pid]}
    found = psutil.Process(pid).children(recursive=True)
    front = [one.pid for one in found if "serve" in one.cmdline()]
    return {"front": front, "bridge": [pid, *(one.pid for one in found if one.pid not in front)]}


class Client:
    """Asks for completions and checks that something was said."""

    def __init__(self, url: str, *, is_stream: bool, tokens: int) -> None:
        self._url = f"{url}/v1/completions"
        self._is_stream = is_stream
        self._body = {
            "model": _MODEL,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": is_stream,
        }
        self.first_s: list[float] = []

    async def run(self, prompts: Sequence[str], in_flight: int) -> list[str]:
        """Ask for all, so many at a time; the texts in their order."""
        limit = asyncio.Semaphore(in_flight)
        connector = aiohttp.TCPConnector(limit=0)
        patience = aiohttp.ClientTimeout(_CLIENT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=patience) as session:
            return list(await asyncio.gather(*(self._ask(session, limit, one) for one in prompts)))

    async def _ask(
        self, session: aiohttp.ClientSession, limit: asyncio.Semaphore, prompt: str
    ) -> str:
        async with limit:
            began = time.perf_counter()
            async with session.post(self._url, json={**self._body, "prompt": prompt}) as response:
                if not response.ok:
                    raise WrongAnswer(f"{response.status}: {await response.text()}")
                if not self._is_stream:
                    return str(json.loads(await response.read())["choices"][0]["text"])
                pieces: list[bytes] = []
                async for chunk in response.content.iter_any():
                    if not pieces:
                        self.first_s.append(time.perf_counter() - began)
                    pieces.append(chunk)
        lines = b"".join(pieces).split(b"\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        if any("error" in one for one in events) or b"data: [DONE]" not in lines:
            raise WrongAnswer(b"".join(pieces)[-300:].decode(errors="replace"))
        return "".join(one["choices"][0]["text"] for one in events if one["choices"])


def put(
    side: Side, prompts: Sequence[str], tokens: int, in_flight: int, *, is_stream: bool
) -> Load:
    """Put a load on a side."""
    client = Client(side.url, is_stream=is_stream, tokens=tokens)
    before, began = cpu_seconds(side.pids), time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        texts = runner.run(client.run(prompts, in_flight))
    seconds, after = time.perf_counter() - began, cpu_seconds(side.pids)
    parts = len(prompts) * (tokens if is_stream else 1)
    spent = {name: 1e6 * (after[name] - before[name]) / parts for name in side.pids}
    first_ms = 1000 * statistics.median(client.first_s) if client.first_s else 0.0
    return Load(texts, seconds, first_ms, spent)


def measure(front: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """All loads on both sides; the figures."""
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        model = write_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        broker = stack.enter_context(embedded_broker())
        loads = [("64", 64, True), ("256", 256, True), ("short", 4096, False)]
        for name, count, is_stream in loads[:1] if quick else loads:
            step = ["--simulated-step-s", str(_STEP_S)] if is_stream else []
            options = ["--model-name", _MODEL, "--stream-interval-ms", "0", *step]
            yard = f"bench-{name}"
            with simulated_yard(broker, yard, 2, 256, (), options), ExitStack() as sides:
                both = {
                    one: sides.enter_context(side(one, broker.url, yard, model))
                    for one in ("gateway", front)
                }
                prompts = [f"w{number + 1} w7" for number in range(count)]
                tokens = _STREAM_TOKENS if is_stream else _SHORT_TOKENS
                in_flight = count if is_stream else _IN_FLIGHT
                found: dict[str, list[Load]] = {one: [] for one in both}
                for one in both.values():  # warm
                    put(one, prompts[:32], 4, 32, is_stream=is_stream)
                for number in range(rounds):
                    for which in list(both) if number % 2 == 0 else list(both)[::-1]:
                        load = put(both[which], prompts, tokens, in_flight, is_stream=is_stream)
                        tell(f"{name}, {which}: {load.per_s:.1f}/s, {dict(load.cpu_us)} µs")
                        found[which].append(load)
                figures |= _figures(name, front, found, both, is_stream=is_stream)
    return figures


def _figures(
    name: str,
    front: str,
    found: Mapping[str, Sequence[Load]],
    sides: Mapping[str, Side],
    *,
    is_stream: bool,
) -> dict[str, Any]:
    # Whole answers of the gateway have the simulated engine's own text.
    wanted = found["gateway"][0].texts if is_stream else None
    for loads in found.values():
        for load in loads:
            for said, right in zip(load.texts, wanted or loads[0].texts, strict=True):
                if not said or _words(said) != _words(right):
                    raise WrongAnswer(f"{name}: {said!r} and {right!r}")
    pairs = list(zip(found["gateway"], found[front], strict=True))
    figures: dict[str, Any] = {
        f"{name}_cpu_ratio": statistics.median(
            sum(theirs.cpu_us.values()) / sum(ours.cpu_us.values()) for ours, theirs in pairs
        ),
        f"{name}_per_s_ratio": statistics.median(
            theirs.per_s / ours.per_s for ours, theirs in pairs
        ),
        f"{name}_first_later_ms": statistics.median(
            theirs.first_ms - ours.first_ms for ours, theirs in pairs
        ),
    }
    for one, loads in found.items():
        label = "gateway" if one == "gateway" else "bridge"
        figures[f"{name}_{label}_per_s"] = statistics.median(load.per_s for load in loads)
        figures[f"{name}_{label}_first_ms"] = statistics.median(load.first_ms for load in loads)
        for program in loads[0].cpu_us:
            spent = statistics.median(load.cpu_us[program] for load in loads)
            figures[f"{name}_{label}_cpu_us_{program}"] = spent
        figures[f"{label}_rss_mib"] = sides[one].rss_mib
        figures[f"{label}_start_s"] = sides[one].start_s
    return figures


def _words(text: str) -> list[str]:
    """Without that of token 0, which is special and which not every front end shows."""
    return [word for word in text.split() if word != "w0"]


def show(figures: Mapping[str, Any], front: str, rounds: int) -> None:
    """Print the figures."""
    print_table(
        f"{front} with a bridge, and the gateway; medians of {rounds}",
        ("", "measured"),
        [(name, value) for name, value in figures.items()],
    )
    print(machine())


@click.command(context_settings={"show_default": True})
@click.option("--front", default="vllm-rs", type=click.Choice(["vllm-rs", "vllm"]))
@click.option("--rounds", default=3, type=click.IntRange(1), help="Medians are shown.")
@click.option("--quick", is_flag=True, help="A small run for CI: the checks, not the figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(front: str, rounds: int, *, quick: bool, as_json: bool) -> None:
    """Compare a front end with a bridge with the gateway before the same workers."""
    end_in_order()
    measured = measure(front, 1 if quick else rounds, quick=quick)
    found = {name: round(value, 3) for name, value in measured.items()}
    publish(found, lambda: show(found, front, rounds), as_json=as_json)


if __name__ == "__main__":
    main()
