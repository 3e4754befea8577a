"""``python -m coordinator``, which is also ``tokenyard coordinator``."""

from __future__ import annotations

import os
from typing import Final

from tokenyard.process.extras import refuse
from tokenyard.process.service_manager import ServiceManager
from tokenyard.protocol.settings import CoordinatorSettings

try:
    from tokenyard.process.program import program
except ModuleNotFoundError as error:
    refuse(error)

TEXTS: Final = {
    "name": "Name of this process.  [default: host and pid]",
    "expect_workers": "Dispatch nothing before so many workers have joined.",
    "policy": "How a worker is chosen for a request.",
    "deterministic": "Let the order of arrival alone decide; needs --expect-workers.",
    "record": "Write each decision to this file, one JSON object a line.",
    "lease_ms": "The leader's lease: the longest standstill when the leader is killed.",
    "block_ms": "Longest wait of one read.",
    "max_num_queued_reqs": "Most requests that may wait; more are refused with QUEUE_FULL.",
    "max_num_queued_tokens": "Most prompt tokens that may wait; more are refused with QUEUE_FULL.",
    "max_normal_share": "Share of both bounds that classes normal and low may take together.",
    "max_low_share": "Share of both bounds that class low may take.",
    "input_token_weight": "What a token of a prompt counts for its tenant's share.",
    "output_token_weight": "What a token of an answer counts for its tenant's share.",
    "max_held": "Waiting requests kept in memory, among which clients take turns.",
    "max_request_bytes": "Most bytes of one request.",
    "max_batch": "Most requests dispatched in one step.",
    "max_crashes": "Workers that may be lost with a request before it must run alone.",
    "max_crashed_alone": "Workers that may crash while a request runs alone; then it is dead.",
    "max_lost_alone": "Workers that may be killed while a request runs alone; then it is dead.",
    "max_faults": "Times that an engine may fail to serve a request; then it is dead.",
    "max_trial_share": "Largest share of a model's workers that try suspects of a crash.",
    "trial_tokens": "Tokens after which a stream on trial is innocent.",
    "trial_s": "Seconds after which any other request on trial is innocent.",
    "static": "Load no models on demand: workers keep their models.",
    "max_model_wait_s": "Longest wait for workers of another model; 0: by the cost of swaps.",
    "max_swap_share": "Largest share of a device's time for swaps of models.",
    "lost_entry_wait_s": "How long a worker may still end a request whose lane entry was deleted.",
    "reply_maxlen": "Most entries of one reply stream.",
    "dead_maxlen": "Most dead letters.",
}


def run(settings: CoordinatorSettings) -> int:
    """Run a coordinator, which assigns requests to workers.

    One of a yard's coordinators leads; the others stand by and take over when it dies. It needs no
    GPU. SIGTERM or Ctrl-C stops it; no request is lost.

    Examples:
      tokenyard --redis-url redis://broker:6379 coordinator
      tokenyard coordinator --expect-workers 8 --deterministic --record schedule.jsonl
    """
    # Late, so that `tokenyard --help`, which lists this command, stays quick.
    from coordinator.coordinator import Coordinator

    return Coordinator(settings, ServiceManager(os.environ)).run()


main = program("coordinator", CoordinatorSettings, run, texts=TEXTS)

if __name__ == "__main__":
    main()
