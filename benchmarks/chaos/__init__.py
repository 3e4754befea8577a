"""Processes of a yard are killed, stopped and cut off, and every request is checked."""
