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
    "engine": "The engine. `simulated` needs no model: its tokens follow from the prompt.",
    "model": "Folder or Hugging Face name of the model.",
    "model_name": "Name that requests use for the model.  [default: last part of --model]",
    "revision": "Revision of a Hugging Face model.",
    "models": "File that lists the models that may be loaded (docs/models.md).",
    "slots": "Devices of this host; each has one active worker process.",
    "spares": "Additional warm processes, which replace those that die.",
    "sleepers": "Engines that may sleep on each device beside the active one.",
    "device": "What engines use; `auto` asks vLLM and torch.",
    "devices": "GPUs by index or UUID, one for each slot.  [default: the first; on a CPU none]",
    "dtype": "Type of the weights (vLLM's name).",
    "max_model_len": "Most tokens, prompt and output together; 0: as many as the model allows.",
    "max_num_seqs": "Requests that one engine runs at once (vLLM's name).",
    "enforce_eager": "No graph capture and no compilation: faster start; for CPUs and tiny models.",
    "engine_args": "JSON object of further arguments for the engine, by vLLM's names.",
    "lease_ms": "The workers' leases: how soon the requests of a lost host continue elsewhere.",
    "block_ms": "Longest wait of one read.",
    "start_timeout_s": "Silence after which a process that warms up, loads or unloads is killed.",
    "load_timeout_s": "Longest time to load a model, with its download; then it is given up.",
    "drain_timeout_s": "Time for running requests to finish before their model is replaced.",
    "leak_tolerance": "Share of its warm memory by which a process may grow in six unloads.",
    "leak_floor_mib": "The same in MiB; the larger one applies.",
    "hang_timeout_s": "An engine with requests that makes no step for this time is killed.",
    "stream_interval_ms": "Least time between two deltas of a stream that names none, while more "
    "than 32 run.",
    "max_grammar_bytes": "Most bytes of one constraint on the text (`structured_outputs`).",
    "grammar_timeout_s": "Longest time to compile such a constraint.",
    "grace_s": "On SIGTERM, time for running requests to finish; the others are requeued.",
    "backoff_s": "First pause before a dead worker process is restarted.",
    "max_backoff_s": "Longest such pause.",
    "max_start_failures": "Failed starts of one kind, before any success, that count as permanent.",
    "on_start_failure": "Then exit with status 5 (exit), or log it and keep trying (retry).",
    "reply_maxlen": "Most entries of one reply stream.",
    "simulated_prefill_rate": "Simulated engine: prompt tokens per second; 0: no limit.",
    "simulated_step_s": "Simulated engine: seconds per step; 0: no limit.",
    "simulated_cache_tokens": "Simulated engine: size of its prefix cache in tokens.",
    "simulated_load_s": "Simulated engine: seconds to load a model.",
    "crash_point": "Simulated engine, for tests: where the process kills itself.",
}


def run(settings: WorkerSettings) -> int:
    """Run this host's workers, one process for each slot.

    A controller starts the worker processes, keeps their leases and starts them again when they
    die. SIGTERM or Ctrl-C stops them after their running requests, or after --grace-s, which
    requeues those.

    Examples:
      tokenyard --redis-url redis://broker:6379 worker --model meta-llama/Llama-3.1-8B-Instruct
      tokenyard worker --model ./my-model --slots 4 --devices 0,1,2,3
      tokenyard worker --models models.toml --slots 4 --spares 1
    """
    # A late import keeps `tokenyard --help`, which lists this command, fast.
    from worker.host.controller import Controller

    return Controller(settings, ServiceManager(os.environ)).run()


main = program("worker", WorkerSettings, run, texts=TEXTS)

if __name__ == "__main__":
    main()
