"""Tests of the Lua files, on real servers."""
