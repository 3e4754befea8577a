"""Kills, stops and disconnects the processes of a yard under load, and checks every request."""
