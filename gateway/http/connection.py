"""One connection of a client of the gateway, whose own answers have the form of its API."""

from __future__ import annotations

import secrets

from gateway.http.anthropic import error_body, is_of_messages
from gateway.http.errors import GatewayError
from tokenyard.process.http_connection import BoundedConnection


class GatewayConnection(BoundedConnection):
    """Refuses in the form of the endpoint, if its name has come."""

    content_type = b"application/json"

    def refusal(self, status: int, message: str) -> bytes:
        """An error as OpenAI's or Anthropic's clients expect it."""
        if is_of_messages(self.url.partition(b"?")[0].decode("latin-1")):
            return error_body(status, message, secrets.token_hex(16))
        return GatewayError(status, message).body()
