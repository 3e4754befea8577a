"""What the process imports that gateways and batch workers are forked from: all they need."""

import os

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from gateway.frontend import derived

derived.install()

import gateway.app  # noqa: E402 - behind `install`
import gateway.batches.work  # noqa: E402, F401
