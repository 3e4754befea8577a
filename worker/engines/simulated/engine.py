"""An engine without a model: tokens from a hash of the request, time from a speed model.

For tests of the control plane and for benchmarks of the broker. It identifies itself:
`EngineInfo.engine` is ``simulated``, and it refuses requests for values that need a model.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Final

import tokenyard
from tokenyard import clock
from tokenyard.protocol.errors import Code
from tokenyard.protocol.wire import Assignment, pack_tokens
from worker.engines import EngineEvent, EngineInfo, Finished, RequestError, Unsupported
from worker.engines.admission import check_resumable
from worker.engines.crash_points import CrashPoint
from worker.engines.simulated.generation import (
    SIMULATED_TASKS,
    Generation,
    cache_salt,
    choice_so_far,
    new_deltas,
    start_generation,
    tokenize,
)

#: A model with this path, or weights in a folder of this name, cannot be loaded.
BROKEN: Final = "broken"
#: Weights in a folder of this name pass `check_weights`, but cannot be loaded.
CORRUPT: Final = "corrupt"
MAX_MODEL_LEN: Final = 8_192
UNLIMITED_SEQS: Final = 256  # reported to the coordinator by an engine without a batch limit


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Rates and sizes that determine the time of a step; zero means no limit.

    A step prefills the uncached tokens of new prompts, and then makes ``tokens_per_step`` tokens
    for every request in the batch. Without a decode rate, a request that does not stream takes one
    step.
    """

    prefill_tokens_per_s: float = 0.0  # of all prompts together
    decode_tokens_per_s: float = 0.0  # of each sequence, regardless of their number
    max_num_seqs: int = 0
    tokens_per_step: int = 1
    cache_tokens: int = 0  # capacity of the prefix cache; zero: no cache


class SimulatedDevice:
    """Sleeps for the time that a device would need."""

    def __init__(self, speed: SpeedModel) -> None:
        self._speed = speed
        self._free_at_s = 0.0  # monotonic

    def work(self, prefilled: int) -> None:
        """Run one step with ``prefilled`` uncached prompt tokens.

        Steps end by the device's own clock: after a sleep that was too long, the next ones are
        shorter.
        """
        cost_s = 0.0
        if self._speed.prefill_tokens_per_s:
            cost_s += prefilled / self._speed.prefill_tokens_per_s
        if self._speed.decode_tokens_per_s:
            cost_s += self._speed.tokens_per_step / self._speed.decode_tokens_per_s
        if not cost_s:
            return
        now = clock.monotonic()
        if now - self._free_at_s > cost_s:
            self._free_at_s = now  # it was idle, not late
        self._free_at_s += cost_s
        if self._free_at_s > now:
            clock.sleep(self._free_at_s - now)


class SimulatedEngine:
    """Answers every request with tokens that depend on the request and the weights alone.

    Token i of choice c is a word of the hash of prompt, seed, c and the path of the weights, if
    they are not the model's own. So it is the same on every worker, in every batch and after every
    crash. An answer costs one pass of a hash function, so a benchmark measures the broker. Text
    has one printable character per token.
    """

    def __init__(
        self,
        model: str = "simulated",
        *,
        speed: SpeedModel | None = None,
        vocab_size: int = 32_000,
        max_model_len: int = MAX_MODEL_LEN,
        adapters: Sequence[str] = (),
        crash_point: str | CrashPoint = "",
        path: str = "",
        revision: str = "",
        weights: str = "",
        phases_s: dict[str, float] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """``path`` is the path of the model's own weights, ``weights`` that of a replacement.

        ``release`` releases the group of the engine.

        Raises `ValueError` for a ``crash_point`` that `CrashPoint` cannot parse.
        """
        self._speed = speed or SpeedModel()
        if isinstance(crash_point, str):
            crash_point = CrashPoint(crash_point)
        self._crash = crash_point
        self._release = release
        self._sleeps = False
        self._is_open = True
        self._path = path
        self._waiting: deque[Generation] = deque()
        self._running: dict[str, Generation] = {}
        self._device = SimulatedDevice(self._speed)
        self._cache = PrefixCache(self._speed.cache_tokens)
        #: The model and the limits.
        self.info = EngineInfo(
            engine="simulated",
            engine_version=tokenyard.__version__,
            model=model,
            revision=revision,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=self._speed.max_num_seqs or UNLIMITED_SEQS,
            adapters=tuple(adapters),
            phases_s=phases_s or {},
            weights=weights,
            cache_tokens=self._cache.tokens,
            tasks=SIMULATED_TASKS,
        )

    def add(self, assignment: Assignment) -> None:
        """Add a request; see `worker.engines.Engine.add`."""
        if self._sleeps:
            raise RuntimeError("the engine sleeps; wake it first")
        check_resumable(assignment)
        generation = start_generation(assignment, self.info, self._salt)
        prompt = tokenize(assignment.request)
        generation.is_poison = self._crash.is_poison(prompt)
        generation.is_faulty = self._crash.is_faulty(prompt, assignment.faults)
        self._waiting.append(generation)

    def listen(self, wake: Callable[[], None]) -> None:
        """It makes outputs in its steps only."""

    def freeze(self, is_frozen: bool) -> None:
        """It makes outputs in its steps only."""

    def abort(self, keys: Iterable[str]) -> None:
        """Drop requests by lane entry; unknown ones are ignored."""
        gone = set(keys)
        for key in gone & self._running.keys():
            del self._running[key]
        if any(generation.key in gone for generation in self._waiting):
            self._waiting = deque(one for one in self._waiting if one.key not in gone)

    def take_out(self, key: str) -> Finished | None:
        """Stop a request and return its output; see `worker.engines.Engine.take_out`."""
        generation = self._running.get(key)
        if generation is None:
            generation = next((one for one in self._waiting if one.key == key), None)
        if generation is None:
            return None
        self.abort([key])
        return Finished(
            key,
            [choice_so_far(choice, generation.made) for choice in generation.choices],
            generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work."""
        return bool(self._running or self._waiting)

    def progress(self) -> dict[str, int]:
        """Tokens made so far of whole answers; see `worker.engines.Engine.progress`."""
        whole = (one for one in self._running.values() if not one.streams)
        return {
            one.key: sum(min(one.made, len(choice.tokens)) for choice in one.choices)
            for one in whole
        }

    @property
    def is_worn(self) -> bool:
        """Never."""
        return False

    def step(self) -> list[EngineEvent]:
        """Admit waiting requests and make the next tokens of all, in the time of the speed model.

        Kills this process at a crash point; a request that is to fail yields a `RequestError`.
        """
        self._crash.kill_if_due("before_step")
        self._device.work(self._admit())
        if any(generation.is_poison for generation in self._running.values()):
            self._crash.kill_if_due("poison")
        events: list[EngineEvent] = []
        for generation in list(self._running.values()):
            self._advance(generation, events)
        return events

    def sleep(self, level: int) -> None:
        """Refuse work until `wake`; see `worker.engines.Engine.sleep`."""
        if level not in (1, 2):
            raise Unsupported(f"there is no sleep level {level}, only 1 and 2")
        if self.has_unfinished:
            raise RuntimeError("requests are unfinished; finish or abort them before the sleep")
        if self._sleeps:
            raise Unsupported("the engine sleeps already")
        self._sleeps = True
        self._cache.clear()
        self._crash.kill_if_due("asleep")

    def wake(self) -> None:
        """Accept work again."""
        self._crash.kill_if_due("waking")
        self._sleeps = False

    def reload(self, path: str) -> None:
        """Make later tokens depend on ``path``; see `worker.engines.Engine.reload`."""
        if self._sleeps:
            raise Unsupported("the engine sleeps; wake it first")
        read_weights(path)
        self.info = replace(self.info, weights=path)
        self._cache.clear()
        for generation in (*self._waiting, *self._running.values()):
            generation.change(self.info, self._salt)

    def close(self) -> None:
        """Drop all requests and release the group; idempotent."""
        if self._is_open:
            self._crash.kill_if_due("unloading")
        self._is_open = False
        self._waiting.clear()
        self._running.clear()
        if self._release is not None:
            self._release()

    @property
    def _salt(self) -> bytes:
        """The part of the hash for the weights; empty for the model's own."""
        weights = self.info.weights
        return b"" if weights in ("", self._path) else weights.encode()

    def _admit(self) -> int:
        """Fill the batch; returns the number of new prompt tokens that were not cached."""
        joined = 0
        limit = self._speed.max_num_seqs or len(self._running) + len(self._waiting)
        while self._waiting and len(self._running) < limit:
            generation = self._waiting.popleft()
            self._running[generation.key] = generation
            self._count_and_cache_prompt(generation)
            joined += generation.prompt_tokens - (generation.cached_tokens or 0)
        return joined

    def _count_and_cache_prompt(self, generation: Generation) -> None:
        """Count the cached tokens of a prompt, and add the prompt to the prefix cache."""
        if not self._cache.tokens:
            return
        request = generation.request
        prompt = tokenize(request)
        salt = cache_salt(request)
        generation.cached_tokens = self._cache.cached(salt, prompt)
        self._cache.put(salt, prompt)

    def _finish(self, generation: Generation) -> Finished:
        """The answer; adds it to the prefix cache, for requests that continue it."""
        if self._cache.tokens:
            request = generation.request
            answer = pack_tokens(generation.choices[0].tokens)
            self._cache.put(cache_salt(request), tokenize(request) + answer)
        return Finished(
            generation.key,
            generation.choices,
            generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            pooling=generation.pooling,
        )

    def _advance(self, generation: Generation, events: list[EngineEvent]) -> None:
        at_once = not generation.streams and not self._speed.decode_tokens_per_s
        start = generation.made
        if generation.is_faulty and (start > generation.resumed_at or not generation.streams):
            del self._running[generation.key]
            events.append(RequestError(generation.key, Code.INFERENCE_ERROR, "told to fail"))
            return
        end = generation.longest if at_once else start + self._speed.tokens_per_step
        generation.made = end
        if end >= generation.longest:
            self._crash.kill_if_due("before_finish")
            del self._running[generation.key]
            events.append(self._finish(generation))
            return
        if generation.streams:
            self._crash.kill_if_due("mid_stream")
            events.extend(new_deltas(generation, start, end))


def check_weights(weights: str) -> None:
    """Raise `Unsupported` for weights in a folder named `BROKEN`."""
    if PurePath(weights).name == BROKEN:
        raise Unsupported(f"{weights}: broken weights")


def read_weights(weights: str) -> None:
    """Raise `Unsupported` for weights that cannot be loaded."""
    check_weights(weights)
    if PurePath(weights).name == CORRUPT:
        raise Unsupported(f"{weights}: corrupt weights")


# The simulated engine's prefix cache: cached prefixes of prompts need no prefill.
#
# Like vLLM's, it holds whole blocks, and the hash of a block covers all tokens before it. It evicts
# the least recently used block first, and the end of a prompt before its beginning.

BLOCK_TOKENS: Final = 16
_TOKEN_BYTES: Final = 4


class PrefixCache:
    """Holds blocks of up to ``tokens`` tokens; with 0 its caller leaves it alone."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._most = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached(self, salt: str, packed: bytes) -> int:
        """The number of leading tokens of a packed prompt that are cached.

        Never all of them: the last token must be computed to get the next one.
        """
        count = 0
        for block in _hashes(salt, packed[:-_TOKEN_BYTES]):
            if block not in self._blocks:
                break
            count += BLOCK_TOKENS
        return count

    def put(self, salt: str, packed: bytes) -> None:
        """Add packed tokens that the engine has computed, from the first token on."""
        for block in reversed(list(_hashes(salt, packed))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()


def _hashes(salt: str, packed: bytes) -> Iterator[int]:
    """A hash for each whole block; ``salt`` separates different adapters."""
    size, before = BLOCK_TOKENS * _TOKEN_BYTES, hash(salt)
    for at in range(0, len(packed) - size + 1, size):
        before = hash((before, packed[at : at + size]))
        yield before
