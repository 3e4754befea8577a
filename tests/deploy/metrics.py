"""The metrics that `deploy/prometheus` and the board ask for, and a place that shows them."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Kind and labels by name. No other may be asked for.
METRICS: dict[str, tuple[str, dict[str, str]]] = {
    "tokenyard_requests_total": (
        "counter",
        {"model": "small", "priority": "normal", "outcome": "completed"},
    ),
    "tokenyard_requests_rejected_total": ("counter", {"reason": "QUEUE_FULL"}),
    "tokenyard_retries_total": ("counter", {"reason": "fault"}),
    "tokenyard_redeliveries_total": ("counter", {}),
    "tokenyard_dead_total": ("counter", {"reason": "POISONED"}),
    "tokenyard_stale_commits_total": ("counter", {}),
    "tokenyard_queue_depth": ("gauge", {"queue": "normal", "priority": "normal"}),
    "tokenyard_queue_tokens": ("gauge", {"queue": "normal"}),
    "tokenyard_queue_oldest_age_seconds": ("gauge", {"queue": "normal"}),
    "tokenyard_pending": ("gauge", {"worker": "w.1"}),
    "tokenyard_inflight": ("gauge", {"worker": "w.1", "model": "small"}),
    "tokenyard_queue_wait_seconds": ("histogram", {}),
    "tokenyard_assign_seconds": ("histogram", {}),
    "tokenyard_e2e_seconds": ("histogram", {}),
    "tokenyard_ttft_seconds": ("histogram", {}),
    "tokenyard_tpot_seconds": ("histogram", {}),
    "tokenyard_tokens_total": ("counter", {"direction": "output"}),
    "tokenyard_worker_up": ("gauge", {"worker": "w.1"}),
    "tokenyard_worker_lease_age_seconds": ("gauge", {"worker": "w.1"}),
    "tokenyard_worker_state": ("gauge", {"worker": "w.1", "state": "ready"}),
    "tokenyard_model_swap_seconds": ("histogram", {"phase": "load"}),
    "tokenyard_model_swaps_total": ("counter", {}),
    "tokenyard_route_prefix_match_ratio": ("gauge", {}),
    "tokenyard_redis_memory_ratio": ("gauge", {}),
    "tokenyard_batch_lines": ("gauge", {"state": "completed"}),
    "vllm:num_requests_running": ("gauge", {"model_name": "small"}),
    "vllm:num_requests_waiting": ("gauge", {"model_name": "small"}),
    "vllm:kv_cache_usage_perc": ("gauge", {"model_name": "small"}),
}
_NAME = re.compile(r"\b(?:tokenyard_|vllm:)\w+")


def asked_for(expression: str) -> set[str]:
    """The metrics in an expression, a histogram's parts under its own name."""
    return {re.sub(r"_bucket$", "", name) for name in _NAME.findall(expression)}


def exposition(scrapes: int) -> str:
    """All metrics as an endpoint shows them the n-th time; what counts has counted on."""
    lines = []
    for name, (kind, labels) in METRICS.items():
        lines.append(f"# TYPE {name} {kind}")
        if kind == "histogram":
            for bound, count in (("0.1", scrapes), ("1", 2 * scrapes), ("+Inf", 2 * scrapes)):
                lines.append(_sample(f"{name}_bucket", {**labels, "le": bound}, count))
            lines.append(_sample(f"{name}_sum", labels, scrapes))
            lines.append(_sample(f"{name}_count", labels, 2 * scrapes))
        else:
            lines.append(_sample(name, labels, scrapes if kind == "counter" else 1))
    return "\n".join(lines) + "\n"


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value}"


@contextmanager
def shown() -> Iterator[int]:
    """An endpoint with all metrics; its port."""
    scrapes = 0

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal scrapes
            scrapes += 1
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(exposition(scrapes).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
