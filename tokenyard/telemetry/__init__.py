"""Metrics, traces and health probes."""
