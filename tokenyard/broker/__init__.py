"""Connections to Redis and Valkey: URLs, discovery, pools, checks, error translation."""
