"""Clients that are not trusted: the leader empties their inboxes."""
