"""Batch jobs at RQ: the queue, the worker, schedules and call-backs."""
