"""Compares ways to share a yard among tenants."""
