"""Compares routing policies on the workloads that they are made for."""
