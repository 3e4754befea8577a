"""What the process that gateways are forked from imports: all that they need."""

import os

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from gateway.frontend import derived

derived.install()

import gateway.app  # noqa: E402, F401 - behind `install`
