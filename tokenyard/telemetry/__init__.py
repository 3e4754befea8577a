"""Metrics, traces, logs and health probes."""
