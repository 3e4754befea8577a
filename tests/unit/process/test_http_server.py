"""The port of the programs that serve HTTP."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tokenyard.process.http_server import listen
from tokenyard.protocol.errors import SettingsError
from tokenyard.protocol.http_settings import BoardSettings


async def test_small_writes_are_sent_without_a_delay() -> None:
    no_delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def heard(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = writer.get_extra_info("socket")
        no_delay.set_result(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with listen(BoardSettings(redis_url="redis://x", port=0)) as listener:
        async with await asyncio.start_server(heard, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            assert await no_delay
            writer.close()


def test_a_file_that_is_no_certificate_is_told_before_it_serves(tmp_path: Path) -> None:
    file = tmp_path / "no.pem"
    file.write_text("nothing")
    settings = BoardSettings(redis_url="redis://x", port=0, tls_cert=file, tls_key=file)

    with pytest.raises(SettingsError, match="tls_cert, tls_key"):
        listen(settings)
