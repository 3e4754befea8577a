"""Servers that stand behind something: users with few rights, TLS, a Sentinel, a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.servers import Server, ServerName

DEPLOY = Path(__file__).parents[2] / "deploy"


class GuardedServer(Server):
    """The server of `deploy/`, with its users. Each user's password is its name."""

    def __init__(
        self,
        name: ServerName,
        binary: Path,
        folder: Path,
        users: Sequence[str],
        *,
        clients: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        super().__init__(name, binary, folder, aof=True)
        variables = {f"PASSWORD_{user.upper()}": user for user in (*users, *clients)}
        variables |= {"SERVER": str(binary), "USERS_FILE": str(folder / "users.acl")}
        variables |= {"CLIENTS": " ".join(clients)}
        self._command = ["env", *(f"{key}={value}" for key, value in variables.items())]
        self._command += [str(DEPLOY / "start-redis.sh"), "--port", str(self.port)]
        self._command += ["--bind", "127.0.0.1", "--dir", str(folder), *options]

    def url_of(self, user: str) -> str:
        """The URL under which a user connects."""
        return f"redis://{user}:{user}@127.0.0.1:{self.port}"

    def _answers(self) -> bool:
        with redis.Redis.from_url(self.url_of("worker"), retry=Retry(NoBackoff(), 0)) as probe:
            try:
                return bool(probe.ping())
            except redis.RedisError:  # not listening yet, or still loading its data
                return False
