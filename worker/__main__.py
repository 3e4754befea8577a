"""``python -m worker``, which is also ``tokenyard worker``."""

from __future__ import annotations

import os
from typing import Final

from tokenyard.process.extras import refuse
from tokenyard.process.service_manager import ServiceManager
from tokenyard.protocol.settings import WorkerSettings

try:
    from tokenyard.process.program import program
except ModuleNotFoundError as error:
    refuse(error)

TEXTS: Final = {
    "name": "Prefix of the names of this host's workers.  [default: host and pid]",
    "engine": "What generates tokens. `simulated` makes tokens up and needs no model.",
    "model": "Folder or Hugging Face name of the model.",
    "model_name": "Name that requests use for the model.  [default: last part of --model]",
    "revision": "Revision of a Hugging Face model.",
    "models": "File that lists the models that may be loaded (docs/models.md).",
    "slots": "Devices of this host; each has one worker process that is awake.",
    "spares": "Warm processes beside those, to stand in for one that dies.",
    "sleepers": "Engines that may sleep on each device beside the one that is awake.",
    "device": "What engines use; `auto` asks vLLM and torch.",
    "devices": "GPUs by index or UUID, one for each slot.  [default: the first; on a CPU none]",
    "dtype": "Type of the weights (vLLM's name).",
    "max_model_len": "Most tokens, prompt and output together; 0 is what the model allows.",
    "max_num_seqs": "Requests that one engine runs at once (vLLM's name).",
    "enforce_eager": "No graph capture, no compilation: starts sooner; for CPUs and tiny models.",
    "engine_args": "JSON object of further arguments for the engine, by vLLM's names.",
    "lease_ms": "The workers' leases: so long until a vanished host's requests move on.",
    "block_ms": "Longest wait of one read.",
    "start_timeout_s": "Longest silence of a process that warms up, or loads or unloads a model.",
    "drain_timeout_s": "Before a model gives way, its requests may finish for so long.",
    "leak_tolerance": "Part of the warm memory by which a process may grow in six unloads.",
    "leak_floor_mib": "The same in MiB; the larger of both counts.",
    "hang_timeout_s": "An engine that works without making a step for so long is killed.",
    "grace_s": "On SIGTERM, running requests may finish for so long; the rest is handed back.",
    "backoff_s": "First pause before a dead worker process is started again.",
    "max_backoff_s": "Longest such pause.",
    "max_start_failures": "So many failures of one kind before anything works are enough.",
    "on_start_failure": "Then end with status 5 (exit), or say so and go on trying (retry).",
    "reply_maxlen": "Most entries of one reply stream.",
    "simulated_prefill_rate": "Simulated engine: prompt tokens a second; 0 is no limit.",
    "simulated_step_s": "Simulated engine: seconds for each step; 0 is no limit.",
    "simulated_cache_tokens": "Simulated engine: tokens that its prefix cache holds.",
    "simulated_load_s": "Simulated engine: seconds that loading a model takes.",
    "crash_point": "Simulated engine, for tests: where the process kills itself.",
}
ABOUT: Final = """Run this host's workers, one process for each slot.

A controller starts the worker processes, keeps their leases and starts them again when they die.
SIGTERM or Ctrl-C stop them once what they run has finished, or hand it back after --grace-s.

\b
Examples:
  tokenyard --redis-url redis://broker:6379 worker --model meta-llama/Llama-3.1-8B-Instruct
  tokenyard worker --model ./my-model --slots 4 --devices 0,1,2,3
  tokenyard worker --models models.toml --slots 4 --spares 1
"""


def run(settings: WorkerSettings) -> int:
    """Run until told to stop; returns the exit status."""
    # A late import keeps `tokenyard --help`, which lists this command, fast.
    from worker.host.controller import Controller

    return Controller(settings, ServiceManager.of(os.environ)).run()


main = program("worker", WorkerSettings, run, about=ABOUT, texts=TEXTS)

if __name__ == "__main__":
    main()
